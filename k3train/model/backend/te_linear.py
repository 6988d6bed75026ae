"""Linear layers that read one tensor, as one function over transformer-engine's products.

te.Linear is a layer by itself: four projections of one input quantise it four times, and autograd adds four input gradients
in passes of their own. Here an input is quantised once for all its products, and each product of the backward adds to what
the ones before it wrote. A gradient that several products share (that of a sum) is quantised once too.

Where the kernel that wrote a tensor has left word of its largest magnitude (`k3kernels.peaks`), rounding with one scale a
tensor need not look for it: the same scale, one reading less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from k3kernels.peaks import PEAKS, Numbers, peak_scale


class Asked(Protocol):
    """A product as the backend asks for it: y = x weight^T, weight [out, in].

    recipe: None for BF16. caches: the quantised weight is kept, in `kept`, until `refresh` quantises it again.
    """

    weight: nn.Parameter
    recipe: Any | None
    caches: bool
    kept: Any | None


class LastGradient:
    """The quantised form of the gradient seen last: products behind a sum all receive the same tensor."""

    def __init__(self) -> None:
        self.of: Numbers | None = None
        self.key: tuple[Any, ...] = ()
        self.low: Any = None

    def find(self, grad: torch.Tensor, recipe: Any) -> Any:
        """The quantised form of these very numbers, or None."""
        same = self.of is not None and self.key == (grad.shape, id(recipe)) and self.of.are(grad)
        return self.low if same else None

    def keep(self, grad: torch.Tensor, recipe: Any, low: Any) -> None:
        self.of, self.key, self.low = Numbers(grad), (grad.shape, id(recipe)), low

    def forget(self) -> None:
        self.of = self.low = None


@dataclass
class Quantizers:
    """Of one recipe: for inputs, weights, weights that are kept, and output gradients."""

    inputs: Any
    weights: Any
    kept: Any
    gradients: Any


def make_quantizers(recipe: Any) -> Quantizers:
    """As te.Linear makes them: forward is inputs, weights, outputs; backward is output and input gradients."""
    from transformer_engine.pytorch.quantization import RecipeState

    inputs, weights, _ = RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
    _, kept, _ = RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
    gradients, _ = RecipeState.create(recipe, mode="backward", num_quantizers=2).make_quantizers()
    for quantizer in (inputs, weights, kept, gradients):
        quantizer.optimize_for_gemm = True
    for quantizer in (inputs, weights, gradients):
        quantizer.internal = True  # no tensor for autograd; what is kept must be one, to be written in place
    return Quantizers(inputs, weights, kept, gradients)


class Linears:
    """The products of the installed library, for every layer of a model."""

    def __init__(self, te: Any) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.module.base import get_dummy_wgrad
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

        self.te, self.gemm, self.dummy = te, general_gemm, get_dummy_wgrad
        self.current, self.scaled = Float8CurrentScalingQuantizer, Float8Quantizer
        self.last = LastGradient()
        self._quantizers: dict[int, Quantizers] = {}
        self._unread: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, products: Sequence[Asked]) -> list[torch.Tensor]:
        """x [N, in] -> [N, out] for each product, in x's dtype."""
        return list(_Linears.apply(x, self, torch.is_grad_enabled(), products, *(p.weight for p in products)))

    def quantizers(self, recipe: Any) -> Quantizers:
        if id(recipe) not in self._quantizers:
            self._quantizers[id(recipe)] = make_quantizers(recipe)
        return self._quantizers[id(recipe)]

    def round(self, x: torch.Tensor, quantizer: Any, *, columnwise: bool) -> Any:
        """x [N, width] quantised: as it is, and (columnwise) transposed for products that sum over rows."""
        slots = PEAKS.take(x) if isinstance(quantizer, self.current) else None
        if slots is None:
            quantizer.set_usage(rowwise=True, columnwise=columnwise)
            return quantizer(x)
        if self._unread is None or self._unread.device != x.device:
            self._unread = torch.zeros(1, dtype=torch.float32, device=x.device)
        largest = torch.finfo(self.te_dtype(quantizer)).max
        scale = peak_scale(slots, largest, power_of_two=quantizer.force_pow_2_scales)
        known = self.scaled(scale, self._unread, quantizer.dtype, rowwise=True, columnwise=columnwise)
        known.internal = True
        low = known(x)
        low._quantizer = quantizer
        return low

    @staticmethod
    def te_dtype(quantizer: Any) -> torch.dtype:
        """The torch dtype of what a quantizer writes."""
        return torch.float8_e5m2 if "E5M2" in quantizer.dtype.name else torch.float8_e4m3fn

    def weight(self, product: Asked, *, columnwise: bool) -> Any:
        """The quantised weight, kept from before where that is asked for."""
        if not product.caches:
            quantizer = self.quantizers(product.recipe).weights
            quantizer.set_usage(rowwise=True, columnwise=columnwise)
            return quantizer(product.weight)
        if product.kept is None:
            self.refresh(product)
        return product.kept

    @torch.no_grad()
    def refresh(self, product: Asked) -> None:
        """Quantise the kept weight as it is now: in place, since captured steps read it, and both ways, whatever asked first."""
        quantizer = self.quantizers(product.recipe).kept
        quantizer.set_usage(rowwise=True, columnwise=True)
        if product.kept is None:
            product.kept = quantizer(product.weight)
        else:
            quantizer.update_quantized(product.weight, product.kept)

    def gradient(self, dy: torch.Tensor, recipe: Any) -> Any:
        """dy quantised both ways."""
        low = self.last.find(dy, recipe)
        if low is None:
            low = self.round(dy, self.quantizers(recipe).gradients, columnwise=True)
            self.last.keep(dy, recipe, low)
        return low

    def forget(self) -> None:
        """Let go of tensors of the backward before."""
        self.last.forget()
        PEAKS.forget()


def _split(recipe: Any, product: str) -> bool:
    return recipe is not None and getattr(recipe, f"fp8_gemm_{product}").use_split_accumulator


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, linears: Linears, training: bool, products: Sequence[Asked], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        flat = x.contiguous().view(-1, x.shape[-1])
        recipe = next((p.recipe for p in products if p.recipe is not None), None)
        low = None
        if recipe is not None:
            low = linears.round(flat, linears.quantizers(recipe).inputs, columnwise=training)
        outs: list[torch.Tensor] = []
        low_weights: list[Any] = []
        for product, weight in zip(products, weights):
            quantised = product.recipe is not None
            low_weights.append(
                linears.weight(product, columnwise=training and ctx.needs_input_grad[0]) if quantised else None
            )
            out, *_ = linears.gemm(
                low_weights[-1] if quantised else weight, low if quantised else flat, out_dtype=x.dtype,
                use_split_accumulator=_split(product.recipe, "fprop"),
            )  # fmt: skip
            outs.append(out.view(*x.shape[:-1], weight.shape[0]))
        if not training:
            return tuple(outs)
        if low is not None:
            low.update_usage(rowwise_usage=False, columnwise_usage=True)
        # through save_for_backward, so that a recomputed layer does not keep them; kept weights stay where they are
        plain = flat if any(p.recipe is None for p in products) else None
        own = [None if p.caches else w for p, w in zip(products, low_weights)]
        tensors, ctx.tensor_objects = linears.te.prepare_for_saving(plain, low, *weights, *own)
        ctx.save_for_backward(*tensors)
        ctx.linears, ctx.products, ctx.shape, ctx.dtype = linears, products, x.shape, x.dtype
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        linears, products = ctx.linears, ctx.products
        plain, low, *rest = linears.te.restore_from_func_ctx(ctx)
        weights, low_weights = rest[: len(products)], rest[len(products) :]
        dx: torch.Tensor | None = None
        found: list[torch.Tensor | None] = []
        for i, (product, weight, dy) in enumerate(zip(products, weights, grads)):
            if dy is None:
                found.append(None)
                continue
            dy = dy.contiguous().view(-1, dy.shape[-1])
            right, left, x = weight, dy, plain
            if product.recipe is not None:
                right = product.kept if product.caches else low_weights[i]
                left, x = linears.gradient(dy, product.recipe), low
            if ctx.needs_input_grad[0]:
                if product.recipe is not None:
                    right.update_usage(columnwise_usage=True)
                dx, *_ = linears.gemm(
                    right, left, layout="NN", grad=True, out=dx, out_dtype=ctx.dtype, accumulate=dx is not None,
                    use_split_accumulator=_split(product.recipe, "dgrad"),
                )  # fmt: skip
            found.append(
                _weight_gradient(linears, product, x, left, weight.dtype) if ctx.needs_input_grad[4 + i] else None
            )
        return None if dx is None else dx.view(ctx.shape), None, None, None, *found


def _weight_gradient(linears: Linears, product: Asked, x: Any, dy: Any, dtype: torch.dtype) -> torch.Tensor:
    """dy^T x, added to megatron's fp32 buffer where there is one."""
    parameter: Any = product.weight
    buffer = getattr(parameter, "main_grad", None)
    dw, *_ = linears.gemm(
        x, dy, layout="NT", grad=True, out=buffer, out_dtype=dtype if buffer is None else buffer.dtype,
        accumulate=buffer is not None, use_split_accumulator=_split(product.recipe, "wgrad"),
    )  # fmt: skip
    if buffer is None:
        return dw
    parameter.grad_added_to_main_grad = True
    return linears.dummy(list(parameter.shape), parameter.dtype)
