"""A folder with MXFP4 experts generates alike with its experts kept packed and with their decoded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3train.errors import WeightsError
from k3train.inference.cache import new_cache
from k3train.inference.decoder import Decoder
from k3train.inference.generate import Sampling, generate
from k3train.inference.loading import build_decoder
from k3train.inference.packed import PackedStack
from k3train.parallel.layout import Layout
from k3train.weights.opening import open_hf
from tests.weights.helpers import MOE, change_tensors, golden_folder

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 99, 3, 64, 2, 8], [1, 2]]


def decoder_of(folder: Path, layout: Layout, *, packed: bool | None, device: torch.device = CPU) -> Decoder:
    return build_decoder(open_hf(folder), layout, device, "fp32", packed=packed)


def written(decoder: Decoder) -> list[list[int | None]]:
    return list(generate(decoder, PROMPTS, 8, Sampling()))


def logits(decoder: Decoder) -> torch.Tensor:
    device = decoder.model.ctx.device
    cache = new_cache(decoder.model.ctx.model, 2, 16, dtype=torch.float32, device=device)
    prompts = [torch.tensor(p, device=device) for p in PROMPTS]
    return decoder.forward(prompts, cache, logits_of="all").cpu()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same values with packed experts and in bfloat16 (the golden experts lie on the grid)."""
    at = tmp_path_factory.mktemp("packed")
    return golden_folder(at / "packed", packed=True), golden_folder(at / "wide")


@pytest.fixture(scope="module")
def wide(folders: tuple[Path, Path], one_rank: Layout) -> Decoder:
    return decoder_of(folders[1], one_rank, packed=None)


def test_experts_kept_packed_generate_what_their_values_do(folders, wide, one_rank) -> None:  # type: ignore[no-untyped-def]
    kept = decoder_of(folders[0], one_rank, packed=True)
    assert written(kept) == written(wide)
    assert torch.allclose(logits(kept), logits(wide), rtol=0, atol=1e-5 * float(logits(wide).abs().max()))


def test_a_cpu_decodes_the_experts_once_at_load(folders, wide, one_rank) -> None:  # type: ignore[no-untyped-def]
    decoded = decoder_of(folders[0], one_rank, packed=None)
    assert not any(isinstance(m, PackedStack) for m in decoded.model.modules())
    assert torch.equal(logits(decoded), logits(wide))


def test_joined_projections_decode_what_single_ones_prefill(wide: Decoder) -> None:
    """A loaded model joins what a decode step multiplies with one input; a prefill goes through every projection."""
    model = wide.model
    assert all(hasattr(layer.attention, "joined") for layer in model.layers.values())
    whole = logits(wide)[:7]
    cache = new_cache(model.ctx.model, 1, 16, dtype=torch.float32)
    steps = [wide.step(torch.tensor([token]), cache)[0] for token in PROMPTS[0]]
    assert torch.allclose(torch.stack(steps), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


def test_no_expanded_expert_is_held(folders, one_rank) -> None:  # type: ignore[no-untyped-def]
    kept = decoder_of(folders[0], one_rank, packed=True)
    stacks = [m for m in kept.model.modules() if isinstance(m, PackedStack)]
    assert len(stacks) == 3 * 8  # w1, w3, w2 of the layers behind the dense one
    assert not [name for name, _ in kept.model.named_parameters() if ".experts." in name]
    held = sum(b.numel() for stack in stacks for b in stack.buffers())
    assert held * 32 == 17 * 8 * 8 * 3 * 32 * 32  # 17 bytes for 32 weights; 8 layers, 8 experts, 3 matrices of 32 x 32


def test_packing_is_refused_for_weights_that_are_not_packed(folders, one_rank) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WeightsError, match="does not hold every routed expert in MXFP4"):
        decoder_of(folders[1], one_rank, packed=True)


def test_a_scale_that_is_nan_is_refused_by_name(tmp_path, one_rank) -> None:  # type: ignore[no-untyped-def]
    name = MOE.format(3) + "experts.5.w2.weight_scale"
    folder = change_tensors(golden_folder(tmp_path / "bad", packed=True), lambda t: t[name].fill_(255))
    with pytest.raises(WeightsError, match=r"layers\.3\.moe\.experts\.w2, expert 5 has scale bytes 255"):
        decoder_of(folder, one_rank, packed=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_them_packed_by_itself(folders, wide, one_rank) -> None:  # type: ignore[no-untyped-def]
    kept = decoder_of(folders[0], one_rank, packed=None, device=torch.device("cuda"))
    assert any(isinstance(m, PackedStack) for m in kept.model.modules())
    assert torch.allclose(logits(kept), logits(wide), rtol=0, atol=1e-3 * float(logits(wide).abs().max()))
