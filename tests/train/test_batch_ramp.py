"""A run stopped inside the batch ramp goes on as if it had not stopped, with the data that follows."""

from __future__ import annotations

import pytest

from k3train.config.schema import ScheduleConfig
from k3train.inference.loading import load_decoder
from k3train.train.schedule import consumed_samples, global_batch, learning_rate
from k3train.weights.commands import tensors_left_out
from k3train.weights.opening import open_weights
from tests.train import warm

RAMP = (
    "train.global_batch=6", "train.micro_batch=2", "schedule=wsd", "schedule.batch_ramp='2:2:3'",
    "schedule.warmup_fraction=0.2", "model.mtp_layers=1",
)  # fmt: skip


def seen(job: warm.Job) -> list[tuple[int, float, float, int, float]]:
    keys = ("step", "train/loss", "train/lr", "data/consumed_samples", "train/mtp_loss")
    return [tuple(r[k] for k in keys) for r in job.steps()]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[warm.Job, warm.Job]:
    folder = tmp_path_factory.mktemp("ramp")
    straight = warm.start(folder, "straight", *RAMP)
    assert straight.wait(300) == [0], straight.output()
    first = warm.start(folder, "halves", *RAMP, "train.stop_after=5")
    assert first.wait(300) == [75], first.output()
    second = warm.start(folder, "halves", *RAMP)
    assert second.wait(300) == [0], second.output()
    return straight, second


def test_losses_rates_and_samples_are_those_of_a_run_that_never_stopped(halves: tuple[warm.Job, warm.Job]) -> None:
    straight, second = halves
    assert seen(second) == seen(straight)
    sizes = [global_batch(s, 6, "2:2:3") for s in range(10)]
    assert sizes == [2, 2, 2, 4, 4, 4, 6, 6, 6, 6]  # stopped in the middle of the second size
    assert [r[3] for r in seen(second)] == [consumed_samples(s + 1, 6, "2:2:3") for s in range(10)]
    schedule = ScheduleConfig(kind="wsd", warmup_fraction=0.2)
    assert [r[2] for r in seen(second)] == pytest.approx([learning_rate(s, 10, 4e-3, schedule) for s in range(10)])


def test_the_layer_of_multi_token_prediction_stays_behind_at_export(halves: tuple[warm.Job, warm.Job]) -> None:
    opened = open_weights(halves[0].run, lambda text: None)
    left = tensors_left_out(opened, "auto")
    assert len(left) > 10 and all(name.startswith("mtp.") for name in left)


def test_decoding_goes_without_it(halves: tuple[warm.Job, warm.Job], one_rank: object) -> None:
    import torch

    decoder = load_decoder(open_weights(halves[0].run, lambda text: None), torch.device("cpu"))
    assert not any("mtp" in name for name, _ in decoder.model.named_parameters())
