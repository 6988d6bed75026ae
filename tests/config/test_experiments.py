"""The ladder's jobs and the chain of context lengths compose to checked configurations."""

from __future__ import annotations

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from k3train.config import compose as composing
from k3train.config.compose import compose
from k3train.config.schema import CHOICES, expand_pattern

CHAIN = [
    ("context_8k", 8 * 1024, "runs/k3_proxy"),
    ("context_64k", 64 * 1024, "runs/context_8k"),
    ("context_256k", 256 * 1024, "runs/context_64k"),
    ("context_1m", 1024 * 1024, "runs/context_256k"),
]


@pytest.mark.parametrize(("name", "length", "before"), CHAIN, ids=[name for name, _, _ in CHAIN])
def test_a_longer_context_starts_from_the_stage_before(name: str, length: int, before: str) -> None:
    config = compose([f"experiment={name}"])
    assert (config.run.name, config.train.seq_length, config.checkpoint.load) == (name, length, before)
    assert config.checkpoint.load_optimizer
    moved = compose([f"experiment={name}", "run.dir=elsewhere"])
    assert moved.checkpoint.load == before.replace("runs", "elsewhere")


@pytest.mark.parametrize("mixer", CHOICES["model.mixer"])
def test_the_ladder_composes_for_every_mixer_without_full_attention_layers(mixer: str) -> None:
    config = compose(["experiment=ladder", f"model.mixer={mixer}"])
    assert set(expand_pattern(config.model.pattern, config.model.hybrid)) == {"K"}
    assert config.data.corpus.startswith("recall:overwrite")


def test_the_ladder_sweeps_over_every_mixer() -> None:
    composing.register_schema()
    with initialize_config_dir(str(composing.conf_dir()), version_base="1.3"):
        composed = hydra_compose(composing.PRIMARY, ["experiment=ladder"], return_hydra_config=True)
    assert set(composed.hydra.sweeper.params["model.mixer"].split(",")) == set(CHOICES["model.mixer"])
