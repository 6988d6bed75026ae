"""The golden model through the importer's name table, with its stored inputs and outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import load_file

from k3train.config.schema import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.parallel.layout import Layout
from k3train.weights import names


def tiny_a(attention_residuals: str = "block") -> ModelConfig:
    return ModelConfig(
        name="k3_tiny_a", vocab_size=128, hidden_size=64, pattern="KKKF*2 F", dense_hidden=96, residual_block=4,
        attention_residuals=attention_residuals, kda=KDAConfig(heads=4, head_dim=16),
        mla=MLAConfig(heads=4, q_lora_rank=24, kv_lora_rank=16, nope_dim=16, shared_dim=8, v_dim=16),
        moe=MoEConfig(experts=8, top_k=2, shared_experts=2, expert_hidden=32, latent=32),
    )  # fmt: skip


def build(layout: Layout, dtype: torch.dtype, device: str = "cpu", backend: str = "auto") -> K3Model:
    ctx = make_context(dataclasses.replace(tiny_a(), backend=backend), layout, dtype, torch.device(device))
    return build_chunks(ctx, chunks_of_rank(ctx.model, layout.sizes, 0, None), seed=0)[0]


@torch.no_grad()
def load_golden(model: K3Model, folder: Path) -> K3Model:
    tensors = load_file(folder / "k3_tiny_a" / "model.safetensors")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for entry in names.entries(model.ctx.model):
        value = entry.from_hf(tensors.pop(entry.hf))
        target = state[entry.ours] if entry.expert is None else state[entry.ours][entry.expert]
        target.copy_(value)
    assert not tensors, sorted(tensors)
    return model


def stream_of(io: dict[str, torch.Tensor], kind: str, device: str = "cpu") -> tuple[torch.Tensor, PackedStream]:
    """tokens int64 [T] and the packing of the stored input: `seq` (2 x 70) or `packed` (documents end to end)."""
    if kind == "seq":
        tokens = io["seq.input_ids"].long()
        length = tokens.shape[1]
        cu = torch.arange(0, tokens.numel() + 1, length, dtype=torch.int32)
        return tokens.reshape(-1).to(device), PackedStream(cu.to(device), tokens.numel(), length)
    tokens = io["packed.input_ids"].long()
    return tokens.to(device), PackedStream(io["packed.cu_seqlens"].to(torch.int32).to(device), tokens.numel(), 0)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor, stream: PackedStream) -> torch.Tensor:
    """Mean cross entropy whose targets never cross a document."""
    keep = torch.ones(tokens.numel(), dtype=torch.bool, device=tokens.device)
    keep[(stream.cu_seqlens[1:] - 1).long()] = False
    labels = tokens.roll(-1)
    return torch.nn.functional.cross_entropy(logits[keep].float(), labels[keep])
