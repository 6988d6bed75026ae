"""A client that is not ours: transformers' own KimiLinear class loads what we export and computes the same logits."""

from __future__ import annotations

import pytest
import torch

from k3train.config.compose import compose
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.weights.hf import export_folder
from k3train.weights.load import load_weights
from k3train.weights.quantize import Plan, QuantisedFolder, round_folder
from k3train.weights.reader import HFFolder
from k3train.weights.source import MappingSource

transformers = pytest.importorskip("transformers")

SMALL = [
    "model=kimi_linear_48b", "model.vocab_size=96", "model.hidden_size=64", "model.pattern=KKF K F",
    "model.dense_hidden=96", "model.kda.heads=2", "model.kda.head_dim=16", "model.mla.heads=4",
    "model.mla.kv_lora_rank=16", "model.mla.nope_dim=16", "model.mla.shared_dim=8", "model.mla.v_dim=16",
    "model.moe.experts=8", "model.moe.top_k=3", "model.moe.expert_hidden=32",
]  # fmt: skip


def build(model, layout):
    context = make_context(model, layout, torch.float32, torch.device("cpu"))
    return build_chunks(context, chunks_of_rank(model, layout.sizes, 0, None), seed=3)[0]


@torch.no_grad()
def away_from_the_start(module):
    """Trained-looking values for what starts at zero or one, so that no mistake hides behind them."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if hasattr(tensor, "k3") and tensor.k3.init in ("zeros", "ones"):
            size = 0.02 if name.endswith("router.bias") else 0.3
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
        elif hasattr(tensor, "k3") and tensor.k3.init == "normal":
            tensor.mul_(5)


@pytest.mark.parametrize("q_lora", ["null", "24"], ids=["full-rank queries", "low-rank queries"])
def test_transformers_computes_our_logits_from_our_export(one_rank, tmp_path, q_lora):
    model = compose([*SMALL, f"model.mla.q_lora_rank={q_lora}"]).model
    ours = build(model, one_rank)
    away_from_the_start(ours)
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    export_folder(model, MappingSource(state), tmp_path, identity={})
    # From here on both sides know only the folder, and with it the same bfloat16 values.
    load_weights([ours], HFFolder(tmp_path), one_rank)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=False
    )
    assert type(theirs).__name__ == "KimiLinearForCausalLM"
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, 96, (2, 70), generator=torch.Generator().manual_seed(7))
    stream = PackedStream(torch.tensor([0, 70, 140], dtype=torch.int32), 140, 70)
    with torch.no_grad():
        want = theirs.eval()(tokens, use_cache=False).logits.flatten(0, 1)
        got = ours(tokens.flatten(), None, stream)
    assert want.std() > 0.1, "logits too flat to tell models apart"
    assert (got - want).abs().max() < 2e-5 * want.abs().max()
    swapped = {**state, "layers.2.moe.experts.w1": state["layers.2.moe.experts.w3"]}
    swapped["layers.2.moe.experts.w3"] = state["layers.2.moe.experts.w1"]
    load_weights([ours], MappingSource(swapped), one_rank)
    with torch.no_grad():
        assert (ours(tokens.flatten(), None, stream) - want).abs().max() > 1e-2 * want.abs().max()


def test_transformers_computes_our_logits_of_the_quantised_model_from_its_dequantised_folder(one_rank, tmp_path):
    model = compose(SMALL).model
    ours = build(model, one_rank)
    away_from_the_start(ours)
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    export_folder(model, MappingSource(state), tmp_path / "hf", identity={})
    for name, format in (("packed", "mxfp4"), ("plain", "bf16")):
        folder = QuantisedFolder(HFFolder(tmp_path / "hf"), tmp_path / name, Plan(format=format))
        round_folder(folder, torch.device("cpu"))
        folder.finish()
    load_weights([ours], HFFolder(tmp_path / "packed"), one_rank)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 96, (1, 50), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        want = theirs.eval()(tokens, use_cache=False).logits[0]
        got = ours(tokens.flatten(), None, PackedStream(torch.tensor([0, 50], dtype=torch.int32), 50, 50))
    assert (got - want).abs().max() < 2e-5 * want.abs().max()
