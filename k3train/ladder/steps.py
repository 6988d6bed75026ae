"""Step times of two configurations, taken in turn in one process, so that whatever slows the machine slows both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from k3train.config.schema import Config


def in_turn(first: Config, second: Config, *, pairs: int, warm: int = 3) -> dict[str, Any]:
    """Median seconds of a training step of each, and the quartiles of second / first over neighbouring steps.

    Both train on the same synthetic tokens of train.seq_length and global_batch; the order within a pair alternates.
    """
    from k3train import launch, platform

    platform.install()
    import torch

    place = launch.init_distributed(first)
    torch.set_num_threads(first.train.threads or 1)
    platform.install_adam()
    from k3train.engine.base import Batch
    from k3train.engine.megatron import MegatronEngine
    from k3train.ladder.train import describe
    from k3train.parallel import layout as layouts

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = layouts.initialize(layouts.sizes_from_config(first.parallel, place.world))
    engines = [MegatronEngine(config, layout, device) for config in (first, second)]
    train, vocabulary = first.train, first.model.vocab_size
    total = train.seq_length * train.micro_batch
    draw = torch.Generator().manual_seed(first.run.seed)

    def batches(_: int) -> Iterator[Batch]:
        for _i in itertools.count():
            tokens = torch.randint(vocabulary, (total + 1,), generator=draw)
            bounds = torch.arange(0, total + 1, train.seq_length, dtype=torch.int32)
            yield {
                "tokens": tokens[:-1].to(device), "labels": tokens[1:].to(device),
                "loss_mask": torch.ones(total, device=device), "cu_seqlens": bounds,
            }  # fmt: skip

    def step(which: int) -> float:
        engine = engines[which]
        source = batches(which)
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step(source, first.optim.lr, engine.micro_batches(train.global_batch))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs + warm):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        for which in order:
            taken = step(which)
            if i >= warm:
                seconds[which].append(taken)
    low, _, high = quantiles([b / a for a, b in zip(*seconds)], n=4)
    tokens = f"{train.global_batch} x {train.seq_length} tokens"
    return {
        "device": describe(device), "what": f"{first.model.name}, {tokens}", "pairs": pairs,
        "first": round(median(seconds[0]), 6), "second": round(median(seconds[1]), 6),
        "ratio": [round(low, 4), round(high, 4)],
    }  # fmt: skip
