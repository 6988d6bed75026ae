"""Captured micro-batches: the same step as the eager one, with no wait for the device inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.config.schema import Config
from k3train.engine.graphs import MOST, SMALLEST, Buffers, aligned, pad_documents, whole_schedule
from k3train.parallel.layout import Layout
from tests.engine import capture_cases


@pytest.mark.parametrize(
    ("documents", "room"), [(1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (33, 64)],
    ids=["one", "as many as the smallest graph holds", "one more", "many"],
)  # fmt: skip
def test_documents_are_padded_by_empty_ones_at_the_end(documents: int, room: int) -> None:
    cu = torch.arange(documents + 1, dtype=torch.int32) * 7
    padded = pad_documents(cu)
    assert padded.dtype == cu.dtype
    assert padded[: documents + 1].equal(cu)
    assert padded.numel() == room + 1
    assert (padded[documents:] == 7 * documents).all()


def stream(documents: int, *, valid: bool = False) -> dict[str, torch.Tensor]:
    batch = {
        "tokens": torch.randint(0, 9, (64,)), "labels": torch.randint(0, 9, (64,)), "loss_mask": torch.ones(64),
        "cu_seqlens": torch.linspace(0, 64, documents + 1).int(),
    }  # fmt: skip
    return {**batch, "valid": batch["tokens"] > 3} if valid else batch


def test_micro_batches_of_one_graph_have_one_room_for_documents_and_all_say_what_is_padding() -> None:
    batches = [stream(3), stream(20), stream(9, valid=True)]
    same = aligned(batches)
    assert [b["cu_seqlens"].numel() for b in same] == [33, 33, 33]
    assert all(b["valid"].all() for b in same[:2])
    assert same[2]["valid"].equal(batches[2]["valid"])
    assert "valid" not in aligned(batches[:2])[0]


def test_buffers_are_filled_in_place() -> None:
    first, second = aligned([stream(3), stream(8)]), aligned([stream(5), stream(2)])
    buffers = Buffers(first, torch.device("cpu"))
    assert {t.data_ptr() % 16 for b in buffers.batches for t in b.values()} == {0}  # as tensors of their own have it
    held = [{name: (tensor, tensor.data_ptr()) for name, tensor in batch.items()} for batch in buffers.batches]
    for batches in (first, second):
        buffers.fill(batches)
        for batch, want in zip(held, batches):
            for name, (tensor, address) in batch.items():
                assert tensor.equal(want[name])
                assert tensor.data_ptr() == address


def test_a_graph_holds_a_micro_batch_unless_ranks_meet_between_micro_batches() -> None:
    parallel = config_of("step").parallel
    assert not whole_schedule(parallel)
    for name, value in (("pipeline", 2), ("overlap_grad_reduce", True)):
        assert whole_schedule(dataclasses.replace(parallel, **{name: value}))
    assert not whole_schedule(dataclasses.replace(parallel, data=2, tensor=2))


def test_the_graph_unused_for_longest_is_dropped() -> None:
    graphs = capture_cases.Rehearsal.__new__(capture_cases.Rehearsal)
    ran: list[int] = []
    graphs.begin(lambda batches: ran.append(len(batches)))
    for count in [*range(1, MOST + 1), 1, MOST + 1]:  # twice each: eager, then captured and replayed
        for _ in range(2):
            graphs.micro_batches([stream(3)] * count)
    assert [key[0] for key in graphs.graphs] == [*range(3, MOST + 1), 1, MOST + 1]
    assert len(ran) == 2 * (MOST + 2)


def config_of(graphs: str, *overrides: str) -> Config:
    return compose(
        [
            "model=k3_tiny",
            "train.seq_length=256",
            "train.micro_batch=2",
            "train.global_batch=8",
            "train.precision=bf16",
            f"train.cuda_graphs={graphs}",
            "optim.lr=1e-3",
            *overrides,
        ]  # fmt: skip
    )


def batches(config: Config, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """Packed streams of documents whose number differs from one micro-batch to the next."""
    for m in range(4):
        generator = torch.Generator().manual_seed(100 * step + m)
        tokens = torch.randint(0, config.model.vocab_size, (513,), generator=generator)
        cuts = torch.randint(1, 512, (2 + 3 * m,), generator=generator)
        edges = torch.cat([cuts, torch.tensor([256, 512])]).unique()
        mask = torch.ones(512)
        mask[edges - 1] = 0
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), edges]).to(torch.int32)
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "cu_seqlens": cu}


def train(layout: Layout, config: Config, steps: int = 4) -> tuple[Any, list[Any]]:
    from k3train.engine.megatron import MegatronEngine

    engine = MegatronEngine(config, layout, torch.device("cuda", 0))
    return engine, [engine.step(batches(config, i), config.optim.lr, 4) for i in range(steps)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.recompute=selective"],
        ["train.recompute=full"],
        ["train.recompute=unit", "train.recompute_layers=4"],
        ["model.balancing=aux_loss"],
        ["optim=muon"],
        ["optim.qk_clip=0.001"],
        ["model.mtp_layers=1"],
    ],
    ids=[
        "plain",
        "selective recomputation",
        "full recomputation",
        "one unit computed again",
        "an auxiliary loss",
        "muon",
        "clipped heads",
        "multi-token prediction",
    ],
)
def test_a_captured_step_is_the_eager_step(one_rank: Layout, overrides: list[str]) -> None:
    _, eager = train(one_rank, config_of("none", *overrides))
    engine, captured = train(one_rank, config_of("step", *overrides))
    assert len(engine.graphs.graphs) >= 2  # document counts fall into two rounded numbers
    for a, b in zip(eager, captured):
        assert a.tokens == b.tokens
        assert a.loss == pytest.approx(b.loss, abs=2e-2)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=5e-2)
        assert a.load is not None
        assert b.load is not None
        assert a.extra == pytest.approx(b.extra, rel=0.1)
        assert a.load.sum() == b.load.sum()  # every token is counted once, also when replayed
    assert eager[0].loss == pytest.approx(captured[0].loss, abs=2e-3)


@pytest.mark.gpu
def test_probing_between_replays_sees_the_tensors_and_changes_nothing(one_rank: Layout) -> None:
    engine, results = train(one_rank, config_of("step"), steps=3)
    seen: list[str] = []
    engine.set_probe(lambda name, value: seen.append(name))
    probed = engine.step(batches(engine.config, 3), 1e-3, 4)
    engine.set_probe(None)
    again = engine.step(batches(engine.config, 4), 1e-3, 4)
    assert any(name.startswith("log_decay") for name in seen)
    assert probed.loss < results[0].loss + 0.5
    assert again.loss < results[0].loss + 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_in_a_micro_batch_waits_for_the_device(one_rank: Layout, recompute: str) -> None:
    engine, _ = train(one_rank, config_of("none", f"train.recompute={recompute}"), steps=1)
    batch = {k: v.cuda() for k, v in next(batches(engine.config, 9)).items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._micro_batch(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_waits_for_the_device_a_few_times_at_its_end(one_rank: Layout) -> None:
    """For the norm and loss that decide on the update, and for the numbers that are logged."""
    import warnings

    engine, _ = train(one_rank, config_of("none"), steps=2)
    prepared = list(batches(engine.config, 9))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.step(iter(prepared), 1e-3, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    assert len(waits) <= 12, waits
