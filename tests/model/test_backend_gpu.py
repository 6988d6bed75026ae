"""The GPU backends against the official numbers, and their kernels against the plain path."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3kernels.live_rows import live_rows
from k3train.model.backend.local import Backend
from k3train.model.backend.torch_gpu import TorchBackend
from k3train.model.context import PackedStream
from tests.model.golden_model import build, load_golden, next_token_loss, stream_of

pytestmark = pytest.mark.gpu

needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs transformer-engine")
BACKENDS = ["local", "torch", pytest.param("te", marks=needs_te)]


@pytest.fixture(scope="module")
def io(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "k3_tiny_a" / "io.safetensors")


@pytest.fixture(autouse=True)
def full_precision_products() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    want = want.to(got.device).reshape(got.shape).double()
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("kind", ["seq", "packed"])
@pytest.mark.parametrize("backend", ["local", "torch"])
def test_fp32_matches_the_official_numbers_with_tf32_off(
    one_rank: Any, golden: Path, io: dict[str, torch.Tensor], backend: str, kind: str
) -> None:
    model = load_golden(build(one_rank, torch.float32, "cuda", backend), golden)
    tokens, stream = stream_of(io, kind, "cuda")
    seen: dict[str, torch.Tensor] = {}
    model.ctx.probe = lambda name, value: seen.__setitem__(name, value)
    logits = model(tokens, None, stream)
    model.ctx.probe = None
    worst = {f"hidden.{i}": deviation(seen[f"hidden.{i}"], io[f"fp32.{kind}.hidden.{i}"]) for i in range(9)}
    print(backend, kind, {k: f"{v:.1e}" for k, v in worst.items()})
    assert max(worst.values()) < 5e-5, worst
    assert deviation(logits, io[f"fp32.{kind}.logits"]) < 5e-5
    for i in range(1, 9):
        experts = seen[f"router.{i}.experts"].cpu()
        assert torch.equal(experts, io[f"fp32.{kind}.router.{i}.experts"].reshape(experts.shape).long()), i
    loss = next_token_loss(logits, tokens, stream)
    assert abs(float(loss) - float(io[f"fp32.{kind}.loss"])) < 2e-5


def test_fp32_gradients_match_the_official_ones_with_tf32_off(
    one_rank: Any, golden: Path, io: dict[str, torch.Tensor]
) -> None:
    from k3train.weights import names

    model = load_golden(build(one_rank, torch.float32, "cuda", "torch"), golden)
    tokens, stream = stream_of(io, "packed", "cuda")
    next_token_loss(model(tokens, None, stream), tokens, stream).backward()
    stored = load_file(golden / "k3_tiny_a" / "grads_packed.safetensors")
    total = json.loads((golden / "k3_tiny_a" / "grad_norms.json").read_text())["global_grad_norm"]["packed"]
    grads = {n: p.grad for n, p in model.named_parameters()}
    worst, checked = 0.0, 0
    for entry in names.entries(model.ctx.model):
        grad = grads.get(entry.ours)
        if grad is None:
            continue
        grad = (grad if entry.expert is None else grad[entry.expert]).flatten().double().cpu()
        want = stored[entry.hf].flatten().double()
        if entry.hf.endswith("A_log"):
            want = want[: grad.numel()]
        got = grad if grad.numel() == want.numel() else grad[::23]
        error = float((got - want).norm()) / max(float(want.norm()), 1e-3 * total)
        worst = max(worst, error)
        assert error < 5e-4, (entry.hf, error)
        checked += 1
    print("worst gradient", f"{worst:.1e}", checked)
    assert checked > 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_layer_by_layer_with_selections_forced(
    one_rank: Any, golden: Path, io: dict[str, torch.Tensor], backend: str
) -> None:
    """Each layer gets the fp32 path's depth state; the error of one layer, beside what the plain bf16 path makes."""
    from k3train.model.attention_residuals import DepthState

    reference = load_golden(build(one_rank, torch.float32, "cuda", "local"), golden)
    low = load_golden(build(one_rank, torch.bfloat16, "cuda", backend), golden)
    tokens, stream = stream_of(io, "seq", "cuda")
    state, errors = DepthState(partial=reference.embedding(tokens)), []
    with torch.no_grad():
        for i in range(9):
            inputs = DepthState([t.bfloat16() for t in state.bank], state.partial.bfloat16())
            if i > 0:
                low.layers[str(i)].moe.router.forced = io[f"fp32.seq.router.{i}.experts"].reshape(-1, 2).long().cuda()
            out = low.layers[str(i)](inputs, stream).partial
            state = reference.layers[str(i)](state, stream)
            errors.append(float((out.float() - state.partial).norm() / state.partial.norm()))
    print(backend, [f"{e:.4f}" for e in errors])
    assert max(errors) < 0.02, errors


DOCUMENTS = [0, 1, 300, 307, 1024, 1500, 2048]


def packed(key_dim: int, value_dim: int) -> tuple[list[torch.Tensor], PackedStream]:
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2048, 4, d, device="cuda", generator=g) for d in (key_dim, key_dim, value_dim))
    stream = PackedStream(torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda"), 2048, 1024)
    return [q, k, v], stream


def make(name: str) -> Backend:
    from k3train.model.backend import make_backend

    return make_backend(name, torch.device("cuda"))


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (24, 16)], ids=str)
@pytest.mark.parametrize("name", ["torch", pytest.param("te", marks=needs_te)])
def test_packed_attention_agrees_with_the_masked_one(name: str, dims: tuple[int, int]) -> None:
    inputs, stream = packed(*dims)
    grad = torch.randn(2048, 4, dims[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    results = []
    for backend, dtype in ((Backend(), torch.float32), (make(name), torch.bfloat16)):
        args = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = backend.attention(*args, stream, dims[0] ** -0.5)
        out.backward(grad.bfloat16().to(out.dtype))
        results.append([out.detach(), *(a.grad for a in args)])
    errors = [float((b.float() - a).norm() / a.norm()) for a, b in zip(*results)]
    print(name, dims, [f"{e:.4f}" for e in errors])
    assert max(errors) < 0.01, errors


@pytest.mark.parametrize("name", ["torch", pytest.param("te", marks=needs_te)])
def test_attention_of_a_suffix_agrees_with_the_masked_one(name: str) -> None:
    (q, k, v), _ = packed(192, 128)
    q = q[:700]
    want = Backend().suffix_attention(q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float(), 192**-0.5)
    got = make(name).suffix_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 192**-0.5)
    assert float((got.float() - want).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("name", ["torch", pytest.param("te", marks=needs_te)])
def test_suffixes_of_documents_in_one_call_agree_with_one_call_each(name: str) -> None:
    """A document whose beginning is another rank's, one of one token, and whole ones; empty ones fill up to eight. Queries,
    keys and values lie inside larger tensors, as those of a rank's documents do."""
    lengths = [(200, 900), (1, 1), (320, 320), (179, 179)]
    borders = [[0], [0]]
    for place in range(8):
        for side, ends in enumerate(borders):
            ends.append(ends[-1] + (lengths[place][side] if place < len(lengths) else 0))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in borders)
    (q, k, v), _ = packed(192, 128)
    inputs = q, k, v
    grad = torch.randn(borders[0][-1], 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    results = []
    for backend, dtype in ((Backend(), torch.float32), (make(name), torch.bfloat16)):
        args = [x.bfloat16().to(dtype).detach().requires_grad_() for x in inputs]
        inside = [x[128:][: ends[-1]] for x, ends in zip(args, (borders[0], borders[1], borders[1]))]
        out = backend.suffixes_attention(*inside, cu_q, cu_k, lengths, 192**-0.5)
        out.backward(grad.bfloat16().to(out.dtype))
        results.append([out.detach(), *(a.grad for a in args)])
    errors = [float((b.float() - a).norm() / a.norm()) for a, b in zip(*results)]
    print(name, [f"{e:.4f}" for e in errors])
    assert max(errors) < 0.01, errors


@pytest.mark.parametrize("first_key", [0, 1, 300, 900], ids=lambda n: f"keys from row {n} on")
@pytest.mark.parametrize("name", ["torch", pytest.param("te", marks=needs_te)])
def test_suffixes_that_only_the_device_knows_agree_with_the_masked_ones(name: str, first_key: int) -> None:
    """A block of a captured step under context parallelism: queries from row 1200 of 1777 on, keys of their documents alone.
    Those before are nobody's, whatever a kernel leaves as their gradient (what it does not write is NaN here), and empty
    documents lie at both ends. Nothing waits."""
    begin, end = 1200, 1777
    documents = torch.tensor(
        [0, 1, 300, first_key, 1300, 1301, 1600, 1777, 2048, 2048], device="cuda", dtype=torch.int32
    )
    documents = documents.sort().values
    documents = documents[(documents <= first_key) | (documents > begin)]
    documents = torch.cat([documents, documents[-1:].expand(17 - documents.numel())])
    cu_q = (documents - begin).clamp(0, end - begin)
    cu_k = documents.clamp(first_key, end)
    first = torch.tensor([first_key], device="cuda")
    (q, k, v), _ = packed(192, 128)
    grad = torch.randn(end - begin, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    results = []
    for backend, dtype in ((Backend(), torch.float32), (make(name), torch.bfloat16)):
        args = [x.bfloat16().to(dtype).detach().requires_grad_() for x in (q, k, v)]
        rows = args[0][begin:end]
        for mode in ("default", "error"):  # the first time compiles, and waits
            poison = [torch.full_like(x, torch.nan) for x in args * 4]
            del poison
            for x in args:
                x.grad = None
            torch.cuda.set_sync_debug_mode(mode)
            try:
                keys, values = (live_rows(x[:end], first) for x in args[1:])
                out = backend.suffixes_attention(rows, keys, values, cu_q, cu_k, keys.shape[0], 192**-0.5)
                out.backward(grad.bfloat16().to(out.dtype))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append([out.detach(), *(a.grad for a in args)])
    errors = [float((b.float() - a).norm() / a.norm()) for a, b in zip(*results)]
    print(name, first_key, [f"{e:.4f}" for e in errors])
    assert max(errors) < 0.01, errors


@pytest.mark.parametrize("name", ["torch", pytest.param("te", marks=needs_te)])
def test_grouped_products_agree_and_never_wait_for_the_device(name: str) -> None:
    """Experts with no row, one row and many; counts stay on the device."""
    g = torch.Generator("cuda").manual_seed(0)
    counts = torch.tensor([0, 1, 700, 0, 323, 1024], device="cuda")
    x = torch.randn(2048, 256, device="cuda", generator=g).bfloat16()
    weight = torch.randn(6, 384, 256, device="cuda", generator=g).bfloat16()
    grad = torch.randn(2048, 384, device="cuda", generator=g).bfloat16()
    results = []
    for backend, dtype in ((Backend(), torch.float32), (make(name), torch.bfloat16)):
        a, w = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if dtype == torch.bfloat16 else "default")
        try:
            out = backend.grouped_linear(a, w, counts)
            out.backward(grad.to(dtype))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([out.detach(), a.grad, w.grad])
    errors = [float((b.float() - a).norm() / a.norm()) for a, b in zip(*results)]
    assert max(errors) < 0.01, errors
    assert not results[1][2][0].any() and not results[1][2][3].any(), "an expert without tokens has no gradient"


def test_the_plain_gpu_backend_says_that_it_is_the_slower_one() -> None:
    assert "slower" in TorchBackend.notice
