"""Per-head Muon: what is orthogonalised, by how much it moves, and that its state survives a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.schema import MuonConfig
from k3train.model.parameters import ParameterSpec
from k3train.train import optimizer
from k3train.train.optimizer import PerHeadMuon, blocks, is_muon, orthogonalise_, scale_of
from tests.engine.resuming import straight_and_resumed

FP32 = MuonConfig(ns_dtype="fp32")
MUON = {"optim.name": "muon", "optim.muon.ns_dtype": "fp32"}


def moved(spec: ParameterSpec, layout: Any, muon: MuonConfig, seed: int = 0) -> torch.Tensor:
    """-update / lr of one step from zero momentum, without decay."""
    p = torch.nn.Parameter(torch.zeros(spec.shape))
    p.k3 = spec  # type: ignore[attr-defined]
    p.grad = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
    PerHeadMuon([p], lr=1.0, weight_decay=0.0, muon=muon, layout=layout).step()
    return -p.detach()


def orthogonalise(stack: torch.Tensor, muon: MuonConfig) -> torch.Tensor:
    dtype = torch.bfloat16 if muon.ns_dtype == "bf16" else torch.float32
    return orthogonalise_(stack.to(dtype, copy=True), muon.ns_steps)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)], ids=str)
def test_newton_schulz_is_that_of_emerging_optimizers(shape: tuple[int, int, int]) -> None:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    stack = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    theirs = newton_schulz(stack, 5, "quintic")
    torch.testing.assert_close(orthogonalise(stack, FP32), theirs, rtol=1e-4, atol=1e-5)


def check_symmetric_products(device: str, sizes: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    from k3train.train.newton_schulz_triton import polynomial, symmetric_product

    for count, n, k in sizes:
        x = torch.randn(count, n, k, generator=torch.Generator().manual_seed(n)).to(device, dtype)
        for given in (x, x.mT.contiguous().mT):  # rows or columns next to each other
            gram = symmetric_product(given)
            exact = given.double() @ given.double().mT
            assert float((gram - gram.mT).abs().max()) <= 2e-3 * float(gram.abs().max())
            assert float((gram - exact).norm() / exact.norm()) < 4e-3
            gram = gram / n
            square, unit = gram.double() @ gram.double(), torch.eye(n, device=device, dtype=torch.float64)
            exact = 2.5 * unit - 1.5 * gram.double() + 0.3 * square
            assert float((polynomial(gram, 2.5, -1.5, 0.3) - exact).norm() / exact.norm()) < 4e-3
            size = torch.linspace(0.5, 1.5, count, device=device)  # G is size times the one that is meant
            s = size.double()[:, None, None]
            exact = (2.5 * unit - 1.5 * gram.double() / s + 0.3 * square / s**2) / s.sqrt()
            assert float((polynomial(gram, 2.5, -1.5, 0.3, size) - exact).norm() / exact.norm()) < 4e-3


def check_one_pass_kernels(device: str) -> None:
    from k3train.train.newton_schulz_triton import decay_and_add_, fits, momentum_

    generator = torch.Generator().manual_seed(1)
    grad, buffer, weight = (torch.randn(3, 8, 70, 50, generator=generator).to(device) for _ in range(3))
    for view in (lambda x: x[:, :, :30].flatten(0, 1), lambda x: x[:, 1]):  # rows of heads; matrices apart
        g, b, w = (view(x.clone()) for x in (grad, buffer, weight))
        out = torch.empty(b.shape, dtype=torch.float16, device=device)
        assert not b.is_cuda or fits(g, b, out, w)
        want_b = g + 0.95 * b
        momentum_(g, b, out, 0.95)
        torch.testing.assert_close(b, want_b)
        torch.testing.assert_close(out.float(), g + 0.95 * want_b, rtol=2e-3, atol=2e-3)
        want_w = 0.9 * w - 0.1 * out.float()
        decay_and_add_(w, out, 0.9, -0.1)
        torch.testing.assert_close(w, want_w)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_one_pass_kernels_interpreted() -> None:
    check_one_pass_kernels("cpu")


@pytest.mark.gpu
def test_one_pass_kernels() -> None:
    check_one_pass_kernels("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_symmetric_products_interpreted() -> None:
    check_symmetric_products("cpu", [(2, 256, 128), (1, 150, 70)], torch.float16)


@pytest.mark.gpu
def test_symmetric_products() -> None:
    sizes = [(3, 768, 896), (2, 1792, 3072), (5, 192, 384), (2, 150, 70), (4, 128, 1792)]
    check_symmetric_products("cuda", sizes, torch.bfloat16)


def check_folded(device: str, shape: tuple[int, int, int], dtype: torch.dtype, size: float = 1.0) -> None:
    """The folded iteration of matrices far from norm one against fp32, and no further from it than torch's products."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul_(size).to(device, dtype)
    stack[-1] *= 0.01  # each matrix has its own norm
    want = orthogonalise(stack.float(), FP32)
    plain, folded = stack.clone(), stack.clone()
    optimizer.by_torch_(plain, 5)
    optimizer.folded_(folded, 5)
    error, other = (float((x.float() - want).norm() / want.norm()) for x in (folded, plain))
    assert error < max(1.25 * other, 5e-3), (error, other)
    assert torch.linalg.svdvals(folded.float()).max() < 1.35


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("shape", [(3, 40, 96), (2, 96, 40), (2, 150, 150)], ids=str)
def test_the_folded_iteration_interpreted(shape: tuple[int, int, int]) -> None:
    check_folded("cpu", shape, torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_a_zero_matrix_stays_zero_interpreted() -> None:
    stack = torch.zeros(2, 16, 24)
    stack[1] = torch.eye(16, 24)
    optimizer.folded_(stack, 5)
    assert not stack[0].any() and stack.isfinite().all() and stack[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 768, 896), (4, 896, 768), (6, 128, 1792), (3, 400, 1000)], ids=str)
def test_the_folded_iteration(shape: tuple[int, int, int]) -> None:
    check_folded("cuda", shape, torch.bfloat16, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 768, 896), (4, 896, 768), (3, 400, 1000)], ids=str)
def test_newton_schulz_as_a_step_of_the_optimizer_calls_it(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, device="cuda")
    want = orthogonalise(stack, FP32)
    got = orthogonalise(stack, MuonConfig(ns_dtype="bf16"))
    assert float((got - want).norm() / want.norm()) < 0.05
    values = torch.linalg.svdvals(got.float())
    assert values.max() < 1.35


def test_newton_schulz_brings_singular_values_near_one() -> None:
    stack = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(stack, FP32))
    assert values.min() > 0.6 and values.max() < 1.3
    low = orthogonalise(stack, MuonConfig(ns_dtype="bf16"))
    assert low.dtype == torch.bfloat16 and torch.linalg.svdvals(low.float()).max() < 1.35


def test_the_update_has_the_root_mean_square_asked_for(one_rank: Any) -> None:
    update = moved(ParameterSpec((32, 96)), one_rank, FP32)
    # an orthogonal A x B matrix has rms 1/sqrt(max(A, B)); Newton-Schulz leaves singular values within 0.7 to 1.2
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.25)


def test_two_steps_are_nesterovs_with_decoupled_decay(one_rank: Any) -> None:
    lr, decay, momentum = 0.1, 0.1, 0.95
    p = torch.nn.Parameter(torch.ones(12, 20))
    p.k3 = ParameterSpec((12, 20))  # type: ignore[attr-defined]
    optimizer = PerHeadMuon([p], lr=lr, weight_decay=decay, muon=FP32, layout=one_rank)
    want, buffer = torch.ones(12, 20), torch.zeros(12, 20)
    for seed in range(2):
        p.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        buffer = p.grad + momentum * buffer
        direction = orthogonalise((p.grad + momentum * buffer)[None], FP32)[0]
        want = (1 - lr * decay) * want - lr * 0.2 * 20**0.5 * direction
        torch.testing.assert_close(p.detach(), want)


def test_heads_are_orthogonalised_one_by_one(one_rank: Any) -> None:
    spec = ParameterSpec((4 * 8, 64), tensor_axis=0, head_rows=(8,))
    per_head = moved(spec, one_rank, FP32)
    grad = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
    for h in range(4):
        alone = orthogonalise(grad[None, 8 * h : 8 * h + 8], FP32)[0] * 0.2 * 8.0  # sqrt(max(8, 64)) = 8
        assert torch.allclose(per_head[8 * h : 8 * h + 8], alone, atol=1e-4)
    whole = moved(spec, one_rank, MuonConfig(ns_dtype="fp32", per_head=False))
    assert (whole - per_head).norm() > 0.1 * per_head.norm()


def test_keys_and_values_of_a_head_are_separate_blocks() -> None:
    spec = ParameterSpec((2 * (3 + 5), 7), head_rows=(3, 5))
    update = torch.arange(16 * 7.0).view(16, 7)
    keys, values = blocks(update, spec, per_head=True)
    assert keys.shape == (2, 3, 7) and values.shape == (2, 5, 7)
    assert torch.equal(keys[1], update[8:11]) and torch.equal(values[0], update[3:8])


def test_each_expert_is_a_matrix_by_itself(one_rank: Any) -> None:
    spec = ParameterSpec((3, 16, 24), expert=True)
    update = moved(spec, one_rank, FP32)
    grad = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
    alone = orthogonalise(grad[1:2], FP32)[0] * 0.2 * 24**0.5
    assert torch.allclose(update[1], alone, atol=1e-4)


def test_small_batches_make_the_same_update(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def updated() -> list[torch.Tensor]:
        specs = [ParameterSpec((2 * (3 + 5), 7), head_rows=(3, 5)) for _ in range(3)]
        specs += [ParameterSpec((4, 5, 7), expert=True), ParameterSpec((9, 6))]
        params = []
        for i, spec in enumerate(specs):
            p = torch.nn.Parameter(torch.ones(spec.shape))
            p.k3 = spec  # type: ignore[attr-defined]
            p.grad = torch.randn(spec.shape, generator=torch.Generator().manual_seed(i))
            params.append(p)
        PerHeadMuon(params, lr=0.1, weight_decay=0.1, muon=FP32, layout=one_rank).step()
        return [p.detach() for p in params]

    whole = updated()
    monkeypatch.setattr(optimizer, "BATCH", 50)
    monkeypatch.setattr(optimizer, "PIECE", 40)
    for a, b in zip(whole, updated()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("scale", "expected"), [("block", 0.2 * 64**0.5), ("matrix", 0.2 * 128**0.5)])
def test_the_scale_follows_the_block_or_the_matrix(scale: str, expected: float) -> None:
    spec = ParameterSpec((128, 64), head_rows=(8,))
    assert scale_of(torch.zeros(16, 8, 64), spec, scale) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "spec", "muon", "expected"),
    [
        ("layers.0.attention.q_proj.weight", ParameterSpec((8, 8)), FP32, True),
        ("layers.1.moe.experts.w1", ParameterSpec((2, 8, 8), expert=True), FP32, True),
        ("layers.1.moe.router.weight", ParameterSpec((8, 8)), FP32, False),
        ("layers.1.moe.router.weight", ParameterSpec((8, 8)), MuonConfig(router=True), True),
        ("embedding.weight", ParameterSpec((8, 8)), FP32, False),
        ("lm_head.weight", ParameterSpec((8, 8)), FP32, False),
        ("layers.0.attention.q_conv", ParameterSpec((8, 4), init="conv"), FP32, False),
        ("layers.0.attention.dt_bias", ParameterSpec((2, 4), init="dt_bias"), FP32, False),
        ("layers.1.mlp_residual.query", ParameterSpec((8,), init="zeros"), FP32, False),
    ],
)
def test_which_parameters_are_muons(name: str, spec: ParameterSpec, muon: MuonConfig, expected: bool) -> None:
    assert is_muon(name, spec, muon) is expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_goes_on_bit_for_bit(one_rank: Any, tmp_path: Path, precision: str) -> None:
    straight, resumed = straight_and_resumed({**MUON, "train.precision": precision}, tmp_path)
    assert resumed == straight
