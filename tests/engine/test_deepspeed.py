"""ZeRO against the megatron engine's data parallelism: losses, norms, gradients, bad steps, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.pool import pool

pytestmark = pytest.mark.ops
CASES = "tests.engine.deepspeed_cases:"
STAGES = [1, 2, 3]


@pytest.fixture(autouse=True)
def _deepspeed_is_installed() -> None:
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "two ranks"])
def test_losses_and_norms_are_the_megatron_engines(world: int) -> None:
    """1e-5 over three steps, 1e-4 over twenty, fp32 on gloo."""
    for seen in pool(world).run(CASES + "compare", stages=STAGES, steps=20, timeout=200):
        for stage, steps in seen.items():
            assert max(steps[:3]) <= 1e-5, (stage, steps[:3])
            assert max(steps) <= 1e-4, (stage, steps)


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "two ranks"])
def test_losses_and_norms_are_the_megatron_engines_in_bf16(world: int) -> None:
    """1e-6, a thousandth of what one rounding to bf16 moves: sums are fp32, and no scale rounds a gradient anew."""
    half = {"train.precision": "bf16"}
    for seen in pool(world).run(CASES + "compare", stages=STAGES, steps=4, overrides=half, timeout=200):
        assert all(max(steps) <= 1e-6 for steps in seen.values()), seen


def test_every_parameters_gradient_is_the_megatron_engines() -> None:
    (seen,) = pool(1).run(CASES + "gradient_distances", stages=STAGES, timeout=100)
    for stage, worst in seen.items():
        assert worst[0][0] <= 1e-5, (stage, worst[:8])


def test_per_head_muon_is_the_megatron_engines_in_every_stage() -> None:
    overrides = {"optim.name": "muon", "optim.muon.ns_dtype": "fp32", "parallel.distributed_optimizer": False}
    for seen in pool(2).run(CASES + "compare", stages=STAGES, steps=4, overrides=overrides, timeout=100):
        assert all(max(steps) <= 1e-5 for steps in seen.values()), seen


def test_vectors_that_a_kernel_reads_from_several_modules_are_there_in_stage_3() -> None:
    for steps in pool(2).run(CASES + "compare_on_the_kernels_path", stage=3, timeout=100):
        assert max(steps) <= 1e-5, steps


@pytest.mark.parametrize("stages", [[1, 2], [3]], ids=["stages 1 and 2", "stage 3 with offload"])
def test_parameters_longer_than_a_bucket_are_reduced_too(stages: list[int]) -> None:
    """fp32 within 1e-5; bf16, where the sum over ranks is then rounded, within 1e-2."""
    for seen in pool(2).run(CASES + "compare_with_small_buckets", stages=stages, timeout=100):
        assert max(seen) <= 1e-5, seen


@pytest.mark.parametrize("stage", STAGES)
def test_recomputation_and_offload_change_nothing(stage: int) -> None:
    """Recomputation gathers parameters inside a backward, which concerns stage 3 alone."""
    recomputed = [{"train.recompute": "full"}, {"train.recompute": "full", "train.activations.layer_inputs": "offload"}]
    changes: list[dict[str, Any]] = [*recomputed, {"train.recompute": "selective"}] if stage == 3 else []
    plain, *others, offloaded = pool(2).run(
        CASES + "variants", stage=stage, changes=[*changes, {"engine.offload": "cpu"}], timeout=100
    )[0]
    assert all(other == plain for other in others)
    for got, want in zip(offloaded, plain):
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_cannot_be_trusted_change_nothing(stage: int, world: int) -> None:
    """Too large a norm, or a loss that is not a number on one rank: every rank skips, and the run goes on."""
    for seen in pool(world).run(CASES + "bad_gradients", stage=stage, timeout=100):
        assert seen["skipped"] == [True, True] and seen["same"] and seen["went on"], seen
        assert seen["norm"] > 0.1 and seen["loss"] != seen["loss"]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_goes_on_under_other_ranks_and_another_stage(tmp_path: Path, optim: str) -> None:
    """Saved in the background by two ranks in stage 3; read by one rank in stage 1 and by two in stage 2."""
    folder = str(tmp_path / "saved")
    want = pool(2).run(CASES + "save_and_go_on", stage=3, folder=folder, optim=optim, timeout=100)[0]
    assert pool(2).run(CASES + "load_and_go_on", stage=3, folder=folder, optim=optim, timeout=100)[0] == want
    for world, stage in ((1, 1), (2, 2)):
        (got, *_) = pool(world).run(CASES + "load_and_go_on", stage=stage, folder=folder, optim=optim, timeout=100)
        for one, other in zip(got, want):
            assert one == pytest.approx(other, rel=1e-5), (world, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_are_what_deepspeeds_own_save_and_converter_make(tmp_path: Path, stage: int) -> None:
    """Every weight and moment bit for bit, and this engine goes on from DeepSpeed's folder."""
    (seen, _) = pool(2).run(CASES + "by_deepspeeds_own_tools", stage=stage, folder=str(tmp_path), timeout=100)
    assert not seen["different"] and seen["compared"] > 300 and seen["goes on"], seen


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)], ids=["one rank, stage 2", "two ranks, stage 3"])
def test_deepspeeds_own_load_checkpoint_takes_the_folder(tmp_path: Path, world: int, stage: int) -> None:
    """Without anything of this engine: weights and moments bit for bit, and the loss. The settings stay the loader's."""
    folder = str(tmp_path / "step-2")
    pool(2).run(CASES + "save_and_go_on", stage=1, folder=folder, timeout=100)
    for seen in pool(world).run(CASES + "with_plain_deepspeed", stage=stage, folder=folder, timeout=100):
        assert not seen["different"] and seen["rates"] == {0.5}, seen
        assert seen["loss"] == pytest.approx(seen["want"], rel=1e-6)


def test_gradients_lie_in_host_memory_once() -> None:
    for held, share in pool(2).run(CASES + "gradients_kept", stage=3, timeout=100):
        assert held == share


def test_a_save_that_one_rank_cannot_finish_fails_on_every_rank_and_seals_nothing(tmp_path: Path) -> None:
    said = pool(2).run(CASES + "failing_save", folder=str(tmp_path), timeout=100)
    assert len(set(said)) == 1 and "rank 1 could not write its part" in said[0] and "No space left" in said[0]
    pool(2).close()  # its ranks have a broken writer
