"""A model in one process from a run, a checkpoint or a Hugging Face folder, in BF16 or with MXFP4 experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from k3train.errors import WeightsError
from k3train.inference.decoder import Decoder
from k3train.parallel.layout import Layout
from k3train.weights.opening import Opened
from k3train.weights.reader import HFFolder


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


def load_decoder(
    opened: Opened, device: torch.device, precision: str = "auto", *, packed: bool | None = None
) -> Decoder:
    """Build the whole model on `device` and fill it tensor by tensor. precision: auto (bf16 on GPU) | fp32 | bf16.

    packed: whether experts that are stored in MXFP4 stay packed; None is yes on GPU, while a CPU decodes them once.
    """
    from k3train.parallel import layout as layouts

    return build_decoder(opened, layouts.initialize(layouts.Sizes()), device, precision, packed=packed)


def build_decoder(
    opened: Opened, layout: Layout, device: torch.device, precision: str = "auto", *, packed: bool | None = None
) -> Decoder:
    """`load_decoder` in process groups that exist. Raises WeightsError when `packed` is asked of other weights."""
    from k3train.engine.megatron import training_dtype
    from k3train.inference.backend import InferenceBackend
    from k3train.inference.packed import PackedBackend, all_packed, fill_packed
    from k3train.model.build import build_chunks, chunks_of_rank, make_context
    from k3train.weights.load import load_weights

    source = opened.source
    if packed and not all_packed(source):
        raise WeightsError(f"{opened.origin} does not hold every routed expert in MXFP4; load it with packed=False")
    if packed is None:
        packed = device.type == "cuda" and all_packed(source)
    model = dataclasses.replace(opened.model, backend="local", mtp_layers=0)  # of any machine; replaced below
    ctx = make_context(model, layout, training_dtype(precision, device), device)
    ctx.backend = PackedBackend() if packed else InferenceBackend()
    chunks = build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)
    load_weights(chunks, source, layout)
    if packed:
        assert isinstance(source, HFFolder)
        fill_packed(chunks[0], source, layout)
    return Decoder(chunks[0])


def open_source(source: str | None, run_folder: Path, say: Callable[[str], None]) -> Opened:
    """What a verb's `source` names; null is the run of the configuration."""
    from k3train.weights.opening import open_weights

    return open_weights(Path(source) if source is not None else run_folder, say)
