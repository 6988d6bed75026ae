"""Routing kernels (interpreted without a GPU) against plain torch, and plain torch against loops."""

from __future__ import annotations

import pytest
import torch

from k3kernels import routing
from k3kernels.routing import reference, triton_routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 4, 1), (37, 6, 2), (130, 33, 4), (64, 128, 5)]
IDS = [f"{t} tokens, {e} experts, top {k}" for t, e, k in SHAPES]


def case(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    logits = torch.randn(tokens, experts, generator=generator)
    return logits.to(DEVICE), (torch.randn(experts, generator=generator) / 10).to(DEVICE)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES, ids=IDS)
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalised", "raw weights"])
def test_the_kernel_selects_and_weighs_as_torch_does(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits, bias = case(tokens, experts)
    grad = torch.randn(tokens, top_k, device=DEVICE)
    seen = {}
    for backend in ("torch", "triton"):
        leaf = logits.clone().requires_grad_()
        out = routing.route(leaf, bias, top_k, renormalize=renormalize, scale=2.5, backend=backend)
        out[0].backward(grad)
        seen[backend] = (*out, leaf.grad)
    for a, b in zip(seen["torch"], seen["triton"]):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("padded", [False, True], ids=["all tokens", "without padding"])
def test_the_histogram_counts_every_valid_token_once_and_as_torch_does(padded: bool) -> None:
    logits, bias = case(130, 33)
    _, _, cut, cut_expert = routing.route(logits, bias, 4)
    valid = (torch.arange(130, device=DEVICE) % 3 > 0) if padded else None
    counts = {b: torch.zeros(33, 100, dtype=torch.int64, device=DEVICE) for b in ("torch", "triton")}
    for backend, into in counts.items():
        for _ in range(2):
            routing.required_bias_counts(logits, bias, cut, cut_expert, into, valid=valid, backend=backend)
    rows = 130 if valid is None else int(valid.sum())
    assert (counts["triton"].sum(1) == 2 * rows).all()
    # a score that differs in its last bit may fall beside a border of bins
    assert (counts["torch"] - counts["triton"]).abs().sum() <= 8


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES, ids=IDS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_copies_are_sorted_by_expert_and_in_token_order(tokens: int, experts: int, top_k: int, backend: str) -> None:
    chosen = routing.route(*case(tokens, experts), top_k)[1]
    order = routing.make_permutation(chosen, experts, backend=backend)
    wanted = sorted(range(tokens * top_k), key=lambda c: (int(chosen.reshape(-1)[c]), c))
    assert order.source.tolist() == wanted
    assert order.place[order.source.long()].tolist() == list(range(tokens * top_k))
    assert order.counts.tolist() == torch.bincount(chosen.reshape(-1), minlength=experts).tolist()


@pytest.mark.parametrize("padded", [False, True], ids=["all tokens", "without padding"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES, ids=IDS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_copies_of_valid_tokens_are_counted(
    tokens: int, experts: int, top_k: int, backend: str, padded: bool
) -> None:  # fmt: skip
    chosen = routing.route(*case(tokens, experts), top_k)[1]
    valid = torch.arange(tokens, device=DEVICE) % 3 > 0
    counts = routing.expert_counts(chosen, experts, valid=valid if padded else None, backend=backend)
    assert counts.dtype == torch.int64
    assert (
        counts.tolist() == torch.bincount((chosen[valid] if padded else chosen).reshape(-1), minlength=experts).tolist()
    )


def test_blocks_are_summed_over_in_one_launch_across_the_borders_of_its_strips() -> None:
    """More experts than a program of the scan takes, and more blocks than it takes at a time."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 9, (2 * triton_routing.DEEP + 5, 19), dtype=torch.int32, generator=generator).to(DEVICE)
    held = blocks.clone()
    before, counts = triton_routing.scan(blocks)
    assert torch.equal(blocks, held)
    assert torch.equal(counts, blocks.sum(0))
    assert torch.equal(before, (blocks.cumsum(0) - blocks).int())


@pytest.mark.gpu
def test_a_permutation_is_three_kernels_and_follows_its_input_in_a_captured_graph() -> None:
    tokens, experts, top_k = 32768, 128, 4
    chosen = routing.route(*case(tokens, experts), top_k)[1]
    routing.make_permutation(chosen, experts), routing.expert_counts(chosen, experts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        routing.make_permutation(chosen, experts)
        torch.cuda.synchronize()
    assert sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA) == 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, counts = routing.make_permutation(chosen, experts), routing.expert_counts(chosen, experts)
    chosen.copy_(chosen.flip(0))
    graph.replay()
    source, place, right = reference.permutation(chosen, experts)
    assert torch.equal(order.source, source)
    assert torch.equal(order.place, place)
    assert torch.equal(order.counts, right)
    assert torch.equal(counts, right)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dispatch_and_combine_are_a_weighted_sum_over_experts(backend: str, dtype: torch.dtype) -> None:
    """With expert e multiplying by e + 1, the round trip is sum_e p_e (e + 1) x, and so are its gradients."""
    tokens, experts, top_k, width = 50, 7, 3, 20
    logits, bias = case(tokens, experts)
    weights, chosen, *_ = routing.route(logits, bias, top_k)
    weights = weights.detach().requires_grad_()
    x = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
    order = routing.make_permutation(chosen, experts, backend=backend)
    rows, probs = routing.dispatch(x, weights, order, backend=backend)
    factor = torch.repeat_interleave(torch.arange(1, experts + 1, device=DEVICE), order.counts)
    out = routing.combine((rows.float() * probs[:, None] * factor[:, None]).to(dtype), order, backend=backend)
    total = (weights * (chosen + 1)).sum(1, keepdim=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(out.float(), total * x.float(), **tolerance)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(x.grad.float(), total * grad.float(), **tolerance)
    inner = (x.float() * grad.float()).sum(1, keepdim=True)
    tolerance = tolerance if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1.0}
    torch.testing.assert_close(weights.grad, inner * (chosen + 1), **tolerance)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("readers", [(0, 1), (0,), (1,), ()], ids=["both read", "the first", "the second", "none"])
def test_the_gradients_of_two_readers_of_the_rows_are_added_in_fp32(
    backend: str, dtype: torch.dtype, readers: tuple[int, ...]
) -> None:
    tokens, experts, top_k, width = 50, 7, 3, 20
    logits, bias = case(tokens, experts)
    weights, chosen, *_ = routing.route(logits, bias, top_k)
    x = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
    order = routing.make_permutation(chosen, experts, backend=backend)
    *rows, probs = routing.dispatch_twice(x, weights.detach().requires_grad_(), order, backend=backend)
    assert rows[0].data_ptr() == rows[1].data_ptr()
    assert torch.equal(rows[1], routing.dispatch(x, weights, order, backend=backend)[0])
    grads = [torch.randn(tokens * top_k, width, device=DEVICE).to(dtype) for _ in rows]
    sum((rows[r] * grads[r]).sum() for r in readers).backward() if readers else probs.sum().backward()
    if not readers:
        assert x.grad is None
        return
    exact = sum(grads[r].double() for r in readers)[order.place.long()].view(tokens, top_k, width).sum(1)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(x.grad.double(), exact, **tolerance)  # of one rounding; the interpreter's is down


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_bf16_would_lose_between_the_gradients_of_two_readers_is_kept(backend: str) -> None:
    """A token's copies send 1 and -1 to one reader and 2^-10 each to the other: added in bf16 first, nothing is left."""
    weights, chosen, *_ = routing.route(*case(30, 6), 2)
    x = torch.randn(30, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    order = routing.make_permutation(chosen, 6, backend=backend)
    rows, again, _ = routing.dispatch_twice(x, weights, order, backend=backend)
    sign = (1.0 - 2.0 * (order.source % 2))[:, None].to(rows.dtype)
    ((rows * sign).sum() + (again * 2.0**-10).sum()).backward()
    assert (x.grad == 2.0**-9).all()


def test_rows_that_two_read_are_not_to_be_written_to() -> None:
    x = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    weights, chosen, *_ = routing.route(*case(6, 4), 2)
    rows, again, _ = routing.dispatch_twice(x, weights, routing.make_permutation(chosen, 4))
    product = rows * rows
    with pytest.raises(RuntimeError, match="modified inplace"):
        again.mul_(2.0)
    product.sum().backward()


def test_the_reference_routes_as_a_loop_over_tokens_does() -> None:
    logits, bias = (x.cpu() for x in case(9, 6))
    weights, experts, cut, cut_expert = reference.route(logits, bias, 2, True, 1.0)
    for t in range(9):
        s = torch.sigmoid(logits[t])
        ranked = sorted(range(6), key=lambda e: -float(s[e] + bias[e]))
        assert experts[t].tolist() == ranked[:2]
        assert int(cut_expert[t]) == ranked[2]
        torch.testing.assert_close(cut[t], (s + bias)[ranked[2]])
        torch.testing.assert_close(weights[t], s[ranked[:2]] / s[ranked[:2]].sum())


def test_nan_logits_select_experts_that_exist_and_show_in_the_weights() -> None:
    logits, bias = case(5, 33)
    logits[2] = float("nan")
    weights, experts, _, cut_expert = routing.route(logits, bias, 4, backend="triton")
    assert int(experts.max()) < 33
    assert int(cut_expert.max()) < 33
    assert weights[2].isnan().all()
    assert weights[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, b: routing.route(x, b, 6), "top_k"),
        (lambda x, b: routing.route(x, b[:3], 2), "bias"),
        (lambda x, b: routing.route(x, b, 2, backend="cuda"), "backend"),
        (lambda x, b: routing.make_permutation(x, 6), "experts"),
    ],
    ids=["more places than experts", "a bias of another size", "an unknown backend", "experts that are no integers"],
)
def test_wrong_arguments_are_refused_by_name(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(*case(4, 6))


@pytest.mark.gpu
def test_the_router_product_in_bf16_is_the_fp32_product() -> None:
    x = torch.randn(512, 1792, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(128, 1792, device="cuda") * 0.02).bfloat16().requires_grad_()
    grad = torch.randn(512, 128, device="cuda")
    out = routing.product_fp32(x, w)
    exact = x.detach().double() @ w.detach().double().T
    assert ((out.double() - exact).norm() / exact.norm()) < 1e-5
    out.backward(grad)
    for mine, right in ((x.grad, grad.double() @ w.detach().double()), (w.grad, grad.double().T @ x.detach().double())):
        assert ((mine.double() - right).norm() / right.norm()) < 3e-3  # the gradient's own rounding to bf16
