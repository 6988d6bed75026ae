"""Composition gives typed, resolved, checked configurations, and files give them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from k3train.config import compose as composing
from k3train.config.compose import (
    adopt_model,
    check_run_folder,
    claim_run_folder,
    compose,
    diff,
    load_resolved,
    save_resolved,
)
from k3train.config.schema import Config, expand_pattern
from k3train.errors import ConfigError, DataError, EnvironmentError_


def test_defaults_are_the_tiny_model_named_by_itself() -> None:
    config = compose()
    assert isinstance(config, Config)
    assert (config.model.name, config.run.name, config.model.kda.decay_bound) == ("k3_tiny", "k3_tiny", -5.0)


def test_the_tiny_model_has_an_irregular_tail_and_enough_blocks() -> None:
    config = compose()
    layers = expand_pattern(config.model.pattern)
    assert layers.endswith("KKKFF")
    closed, partial = divmod(len(layers), config.model.residual_block)
    assert closed >= 3 and partial >= 1
    assert config.model.moe.latent % 32 == 0 and config.model.moe.expert_hidden % 32 == 0


def test_k3_has_the_released_shape() -> None:
    model = compose(["model=k3"]).model
    layers = expand_pattern(model.pattern)
    assert [i + 1 for i, kind in enumerate(layers) if kind == "F"] == [*range(4, 93, 4), 93]
    assert (len(layers), model.moe.experts, model.moe.top_k, model.residual_block) == (93, 896, 16, 12)


def test_kimi_linear_has_the_released_shape() -> None:
    model = compose(["model=kimi_linear_48b"]).model
    layers = expand_pattern(model.pattern)
    assert [i + 1 for i, kind in enumerate(layers) if kind == "F"] == [4, 8, 12, 16, 20, 24, 27]
    assert (model.kda.decay_bound, model.mla.q_lora_rank, model.moe.latent) == (None, None, None)


def test_overrides_win_over_experiments_and_experiments_over_groups() -> None:
    config = compose(["experiment=smoke", "train.seq_length=64"])
    assert (config.train.steps, config.train.seq_length, config.run.name) == (10, 64, "smoke")


def test_unknown_key_in_a_users_own_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "k3train.yaml").write_text("defaults: [schema, optim: mine, _self_]\n")
    (tmp_path / "optim/mine.yaml").write_text("learning_rate: 1\n")
    with pytest.raises(ConfigError, match="learning_rate"):
        compose([], config_dir=tmp_path)


def test_missing_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "k3train.yaml").write_text("defaults: [schema, _self_]\nmodel: {name: x}\n")
    with pytest.raises(ConfigError, match=r"model\.\w+"):
        compose([], config_dir=tmp_path)


def test_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = compose(["model.kda.decay_bound=null", "evaluate.suites=[a,b]", "cluster.setup=['module load x']"])
    save_resolved(config, tmp_path / "run/config.yaml")
    assert load_resolved(tmp_path / "run/config.yaml") == config
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_saved_file_from_before_a_key_existed_takes_the_default(tmp_path: Path) -> None:
    save_resolved(compose(), tmp_path / "c.yaml")
    tree = yaml.safe_load((tmp_path / "c.yaml").read_text())
    del tree["train"]["watchdog_seconds"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert load_resolved(tmp_path / "c.yaml").train.watchdog_seconds == Config().train.watchdog_seconds


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "train: {stepps: 1}"])
def test_a_damaged_saved_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_resolved(tmp_path / "c.yaml")


def test_diff_gives_saved_and_asked_values() -> None:
    changed = diff(compose(), compose(["model.kda.decay_bound=null", "train.steps=7"]))
    assert changed == {"model.kda.decay_bound": (-5.0, None), "train.steps": (compose().train.steps, 7)}
    assert list(diff(compose(), compose(["train.steps=7"]), "model")) == []


def test_run_folder_with_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    place = [f"run.dir={tmp_path}"]
    save_resolved(compose(place), tmp_path / "k3_tiny/config.yaml")
    assert check_run_folder(compose([*place, "model.kda.decay_bound=null"])) is None, "no step was ever begun"
    (tmp_path / "k3_tiny/metrics.jsonl").touch()
    assert check_run_folder(compose([*place, "train.steps=7"])) is not None
    with pytest.raises(ConfigError) as caught:
        check_run_folder(compose([*place, "model.kda.decay_bound=null"]))
    assert "model.kda.decay_bound: saved -5.0, asked null" in str(caught.value)
    assert "run.name=OTHER" in str(caught.value)
    assert check_run_folder(compose([*place, "run.name=fresh"])) is None


def test_a_claimed_run_folder_is_there_and_empty(tmp_path: Path) -> None:
    folder = claim_run_folder(compose([f"run.dir={tmp_path}/new/runs"]))
    assert folder == tmp_path / "new/runs/k3_tiny" and list(folder.iterdir()) == []
    assert claim_run_folder(compose([f"run.dir={tmp_path}/new/runs"])) == folder


@pytest.mark.parametrize("file", ["runs", "runs/k3_tiny", "runs/k3_tiny/checkpoints", "runs/k3_tiny/logs"])
def test_a_run_folder_that_takes_no_files_is_refused_with_what_to_type(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    place = tmp_path / file if file.startswith("runs/") else tmp_path / "runs/k3_tiny"
    with pytest.raises(EnvironmentError_) as caught:
        claim_run_folder(compose([f"run.dir={tmp_path}/runs"]))
    assert f"run.dir={tmp_path}/runs: {place} cannot be written (Not a directory)" in str(caught.value)
    assert "type run.dir=ELSEWHERE" in str(caught.value)


def test_a_run_goes_on_with_its_saved_model_unless_one_is_typed(tmp_path: Path) -> None:
    place = [f"run.dir={tmp_path}", "run.name=mine"]
    save_resolved(compose([*place, "model.name=other", "model.hidden_size=64"]), tmp_path / "mine" / "config.yaml")
    asked = compose([*place, "train.steps=7"])
    adopted = adopt_model(asked, [*place, "train.steps=7"])
    assert (adopted.model.name, adopted.model.hidden_size, adopted.train.steps) == ("other", 64, 7)
    for typed in ("model=k3_tiny", "model.vocab_size=4096", "+experiment=smoke", "experiment=smoke"):
        assert adopt_model(asked, [*place, typed]) is asked
    assert adopt_model(compose(["run.name=new", f"run.dir={tmp_path}"]), []).model.name == "k3_tiny"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.corpus=/nowhere/*.txt", "matches no file"),
        ("data.corpus={empty}", "all empty"),
        ("data.prefix=/nowhere/x", "data prepare"),
        ("data.tokenizer=/nowhere.json", "tokenizer.json"),
    ],
)
def test_missing_or_empty_corpus_is_refused(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=message):
        compose([override.replace("{empty}", str(tmp_path))])


def test_conf_is_found_in_a_checkout() -> None:
    assert (composing.conf_dir() / "model/k3.yaml").is_file()
