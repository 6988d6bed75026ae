"""What ranks do to quantise one folder together."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from k3train.weights.quantize import Plan, QuantisedFolder
from k3train.weights.quantize_gptq import Calibration, feed_back_folder
from k3train.weights.reader import HFFolder
from k3train.weights.streaming import TokenBatch

LENGTH = 64


def sequences(count: int, seed: int) -> list[TokenBatch]:
    """Packed streams of four sequences with structure: each token is likely to follow its predecessor's successor."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, 128, (4 * LENGTH + 1,), generator=generator)
        repeat = torch.rand(tokens.shape, generator=generator) < 0.7
        for i in range(1, len(tokens)):
            if repeat[i]:
                tokens[i] = (3 * tokens[i - 1] + 1) % 120
        cu = torch.arange(0, 4 * LENGTH + 1, LENGTH, dtype=torch.int32)
        counted = torch.ones(4 * LENGTH, dtype=torch.bool)
        batches.append(TokenBatch(tokens[:-1], tokens[1:], counted, cu, LENGTH))
    return batches


def calibration() -> Calibration:
    return Calibration(sequences(6, 1), sequences(2, 2), sequences(2, 3))


def quantise(source: str, output: str, rank: int | None = None, world: int | None = None, stop_after: int = -1) -> None:
    """GPTQ of `source`; ranks of a pool share the work. `stop_after` shards, the process gives up."""
    rank = dist.get_rank() if rank is None else rank
    world = dist.get_world_size() if world is None else world
    torch.set_num_threads(1)
    folder = QuantisedFolder(
        HFFolder(Path(source)), Path(output), Plan(method="gptq", shard_bytes=20_000), rank=rank, world=world
    )

    def stop(done: int, total: int, what: str) -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    try:
        feed_back_folder(folder, calibration(), torch.device("cpu"), torch.float32, stop, patience=50.0)
        folder.finish()
    except KeyboardInterrupt:
        pass
    finally:
        folder.writer.close()
