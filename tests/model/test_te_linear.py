"""Products of one tensor as one function, against plain products: what is quantised how often, and every gradient.

The library's calls are stood in for: quantising rounds to quarters of a scale, a product is a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from k3kernels.peaks import PEAKS
from k3train.model.backend.te_linear import LastGradient, Linears, Quantizers

RECIPE = SimpleNamespace(
    fp8_gemm_fprop=SimpleNamespace(use_split_accumulator=False),
    fp8_gemm_dgrad=SimpleNamespace(use_split_accumulator=True),
    fp8_gemm_wgrad=SimpleNamespace(use_split_accumulator=True),
)


class Low:
    """A quantised tensor: its two forms, of which one may have been given up."""

    def __init__(self, rounded: torch.Tensor, columnwise: bool) -> None:
        self.rows: torch.Tensor | None = rounded
        self.columns: torch.Tensor | None = rounded if columnwise else None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if rowwise_usage is False:
            self.rows = None
        if columnwise_usage:
            assert self.columns is not None, "asked for a transposed copy that was not made"


class Quantizer:
    """Rounds to a grid; counts what it was given, by name."""

    force_pow_2_scales = False
    dtype = SimpleNamespace(name="kFloat8E4M3")

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen, self.columnwise = name, seen, True

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.columnwise = columnwise

    def __call__(self, x: torch.Tensor) -> Low:
        self.seen.append(self.name)
        return Low((x.detach() * 4).round() / 4, self.columnwise)

    def update_quantized(self, x: torch.Tensor, low: Low) -> None:
        low.rows = low.columns = self(x).rows


class Scaled(Quantizer):
    """With the scale given: what is known of a tensor's peak must be true."""

    def __init__(
        self, scale: torch.Tensor, _amax: torch.Tensor, dtype: Any, *, rowwise: bool, columnwise: bool
    ) -> None:
        super().__init__("scaled", [])
        self.scale, self.columnwise = scale, columnwise

    def __call__(self, x: torch.Tensor) -> Low:
        assert torch.allclose(self.scale, torch.finfo(torch.float8_e4m3fn).max / x.abs().max())
        return super().__call__(x)


@dataclass
class Product:
    weight: nn.Parameter
    recipe: Any | None = None
    caches: bool = False
    kept: Any | None = None


def gemm(a: Any, b: Any, *, layout: str = "TN", out: torch.Tensor | None = None, accumulate: bool = False,
         out_dtype: torch.dtype, **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """b @ a^T, b @ a and b^T @ a, as transformer-engine names its layouts."""
    assert isinstance(a, Low) == isinstance(b, Low)
    left, right = (
        (b if not isinstance(b, Low) else b.columns if layout == "NT" else b.rows),
        (a if not isinstance(a, Low) else a.rows if layout == "TN" else a.columns),
    )
    assert left is not None and right is not None, "a form of the tensor that was given up"
    made = {"TN": lambda: left @ right.T, "NN": lambda: left @ right, "NT": lambda: left.T @ right}[layout]()
    made = made.detach().to(out_dtype)
    if out is None:
        return made, None
    return (out.add_(made) if accumulate else out.copy_(made)), None


def saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    flat: list[torch.Tensor | None] = []
    for t in tensors:
        flat += [t.rows, t.columns] if isinstance(t, Low) else [t]
    return flat, [(t, t.rows is None) if isinstance(t, Low) else None for t in tensors]


def restoring(ctx: Any) -> list[Any]:
    saved, found = list(ctx.saved_tensors), []
    for kind in ctx.tensor_objects:
        if kind is None:
            found.append(saved.pop(0))
        else:
            low = Low(torch.empty(0), False)
            low.rows, low.columns = saved.pop(0), saved.pop(0)
            found.append(low)
    return found


@pytest.fixture
def linears() -> Linears:
    made = object.__new__(Linears)
    seen: list[str] = []
    made.te = SimpleNamespace(prepare_for_saving=saving, restore_from_func_ctx=restoring)
    made.gemm, made.dummy = gemm, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    made.current, made.scaled = Quantizer, Scaled
    made.last, made._unread = LastGradient(), None
    made._quantizers = {id(RECIPE): Quantizers(*(Quantizer(n, seen) for n in ("input", "weight", "kept", "gradient")))}
    made.seen = seen  # type: ignore[attr-defined]
    return made


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Multiples of a quarter: rounding to the grid changes nothing, so that every path gives the same numbers."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4.0


def weights(*outputs: int) -> list[nn.Parameter]:
    return [nn.Parameter(tensor(n, 6, seed=i)) for i, n in enumerate(outputs)]


@pytest.mark.parametrize("recipes", ["none", "all", "some"])
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "one unused"])
def test_products_and_gradients_are_those_of_plain_products(linears: Linears, recipes: str, unused: bool) -> None:
    x = tensor(5, 6, seed=9).requires_grad_()
    low = {"none": (), "all": (0, 1, 2), "some": (0, 2)}[recipes]
    products = [Product(w, RECIPE if i in low else None) for i, w in enumerate(weights(4, 3, 8))]
    outs = linears(x, products)
    used = outs[: 2 if unused else 3]
    sum((out * tensor(*out.shape, seed=7 + i)).sum() for i, out in enumerate(used)).backward()
    y = x.detach().clone().requires_grad_()
    plain = weights(4, 3, 8)
    want = [y @ w.T for w in plain]
    sum((out * tensor(*out.shape, seed=7 + i)).sum() for i, out in enumerate(want[: len(used)])).backward()
    for ours, theirs in zip(outs, want):
        assert torch.equal(ours, theirs)
    assert x.grad is not None and torch.equal(x.grad, y.grad)
    for product, w in zip(products[: len(used)], plain):
        assert torch.equal(product.weight.grad, w.grad)
    seen = linears.seen  # type: ignore[attr-defined]
    assert seen.count("input") == bool(low), "once for all products"
    assert seen.count("weight") == len(low)
    assert seen.count("gradient") == sum(i < len(used) for i in low)


def test_weight_gradients_are_added_to_the_buffer_that_there_is(linears: Linears) -> None:
    product = Product(weights(4)[0], RECIPE)
    product.weight.main_grad = torch.ones(4, 6, dtype=torch.float64)
    x = tensor(5, 6)
    linears(x, [product])[0].sum().backward()
    assert product.weight.grad_added_to_main_grad
    assert torch.equal(product.weight.main_grad, 1 + (torch.ones(5, 4).T @ x).double())


def test_without_gradients_no_transposed_copy_is_made(linears: Linears) -> None:
    quantizers = linears.quantizers(RECIPE)
    with torch.no_grad():
        linears(tensor(5, 6), [Product(weights(4)[0], RECIPE)])
    assert not quantizers.inputs.columnwise and not quantizers.weights.columnwise
    linears(tensor(5, 6), [Product(weights(4)[0], RECIPE)])
    assert quantizers.inputs.columnwise and not quantizers.weights.columnwise, "nobody wants the gradient of x"
    linears(tensor(5, 6).requires_grad_(), [Product(weights(4)[0], RECIPE)])
    assert quantizers.weights.columnwise


def test_a_gradient_behind_a_sum_is_quantised_once(linears: Linears) -> None:
    a, b = (Product(w, RECIPE) for w in weights(4, 4))
    x, z = tensor(5, 6).requires_grad_(), tensor(5, 6, seed=3).requires_grad_()
    (linears(x, [a])[0] + linears(z, [b])[0]).mul(tensor(5, 4)).sum().backward()
    assert linears.seen.count("gradient") == 1  # type: ignore[attr-defined]
    assert torch.equal(z.grad, tensor(5, 4) @ b.weight)
    x.grad = None
    linears(x, [a])[0].mul(2 * tensor(5, 4)).sum().backward()
    assert linears.seen.count("gradient") == 2, "another gradient"  # type: ignore[attr-defined]
    assert torch.equal(x.grad, 2 * tensor(5, 4) @ a.weight)


def test_a_gradient_written_since_is_quantised_anew() -> None:
    last, grad = LastGradient(), torch.ones(3, 2)
    last.keep(grad, RECIPE, "low")
    assert last.find(grad.view(3, 2), RECIPE) == "low" and last.find(grad, object()) is None
    assert last.find(grad.view(2, 3), RECIPE) is None and last.find(torch.ones(3, 2), RECIPE) is None
    grad += 1
    assert last.find(grad, RECIPE) is None
    last.forget()
    assert last.find(grad, RECIPE) is None


def test_kept_weights_are_quantised_when_they_change(linears: Linears) -> None:
    product = Product(weights(4)[0], RECIPE, caches=True)
    x = tensor(5, 6).requires_grad_()
    for _ in range(2):
        linears(x, [product])[0].sum().backward()
    assert linears.seen.count("kept") == 1 and not linears.seen.count("weight")  # type: ignore[attr-defined]
    held = product.kept
    with torch.no_grad():
        product.weight += 1
    linears.refresh(product)
    assert product.kept is held, "captured steps read it where it is"
    x.grad = None
    out = linears(x, [product])[0]
    out.sum().backward()
    assert torch.equal(out, x @ product.weight.T) and torch.equal(x.grad, torch.ones(5, 4) @ product.weight)


def test_a_known_peak_gives_the_scale(linears: Linears, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEAKS, "wanted", True)
    x = tensor(5, 6).requires_grad_()
    slots = PEAKS.slots(x.device)
    assert slots is not None
    slots[3] = x.detach().abs().max()
    PEAKS.note(x, slots)
    out = linears(x, [Product(weights(4)[0], RECIPE)])[0]
    assert torch.equal(out, x @ weights(4)[0].T)
    assert "input" not in linears.seen  # type: ignore[attr-defined]
