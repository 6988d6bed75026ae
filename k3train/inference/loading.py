"""A model in one process from a run, a checkpoint or a Hugging Face folder (BF16, or MXFP4 experts dequantised)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from k3train.inference.decoder import Decoder
from k3train.weights.opening import Opened


def start_process() -> torch.device:
    """Adapter, one-rank process group and device for a verb that runs in one process."""
    from k3train.platform import install

    install()
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_decoder(opened: Opened, device: torch.device, precision: str = "auto") -> Decoder:
    """Build the whole model on `device` and fill it tensor by tensor. precision: auto (bf16 on GPU) | fp32 | bf16."""
    from k3train.engine.megatron import training_dtype
    from k3train.model.build import build_chunks, chunks_of_rank, make_context
    from k3train.parallel import layout as layouts
    from k3train.weights.load import load_weights

    layout = layouts.initialize(layouts.Sizes())
    model = dataclasses.replace(opened.model, backend="auto")
    ctx = make_context(model, layout, training_dtype(precision, device), device)
    chunks = build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)
    load_weights(chunks, opened.source, layout)
    return Decoder(chunks[0])


def open_source(source: str | None, run_folder: Path, say: Callable[[str], None]) -> Opened:
    """What a verb's `source` names; null is the run of the configuration."""
    from k3train.weights.opening import open_weights

    return open_weights(Path(source) if source is not None else run_folder, say)
