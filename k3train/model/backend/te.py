"""The `te` backend: transformer-engine's linears, norms and packed attention, and its FP8 recipes.

Parameters keep the names and shapes of the local backend, so that checkpoints of either load into the other. Experts
are one stacked parameter a projection: in BF16 they go through torch's grouped product, whose sizes stay on the device,
in FP8 through transformer-engine's. Their activation is always the model's own, outside of any fused product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from k3train.config.precision import MULTIPLE, Precision, part_of
from k3train.model.backend.local import Backend, Replicated, RMSNorm
from k3train.model.backend.te_library import TransformerEngine
from k3train.model.parameters import ParameterSpec, new_parameter
from k3train.parallel.slices import rounded_up

if TYPE_CHECKING:
    from k3train.model.context import ModelContext, PackedStream


class TEProduct(nn.Module):
    """One weight and its product. `recipe` is None (BF16) until `TEBackend.finish` has read the module's name."""

    weight: nn.Parameter
    library: TransformerEngine
    recipe: Any | None = None
    caches = False  # train.fp8_cache_weights
    kept: Any | None = None

    def set_weight(self, ctx: ModelContext, weight: nn.Parameter) -> None:
        self.weight = weight
        assert isinstance(ctx.backend, TEBackend)
        self.library = ctx.backend.library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.library.linears(x, [self])[0]


class TEColumn(TEProduct):
    """[T, in] -> [T, out / TP]; the input has already entered the tensor-parallel region."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        super().__init__()
        spec = ParameterSpec((outputs, inputs), tensor_axis=0, std=ctx.model.init_std)
        self.set_weight(ctx, new_parameter(spec, ctx.layout, ctx.dtype))


class TERow(TEProduct):
    """[T, in / TP] -> [T_local, out]; leaves the tensor-parallel region."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layout = ctx.layout
        spec = ParameterSpec((outputs, inputs), tensor_axis=1, std=ctx.model.init_std)
        self.set_weight(ctx, new_parameter(spec, ctx.layout, ctx.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.layout.sizes.tensor == 1:
            return out
        if self.layout.sizes.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(out, group=self.layout.tp)
        return reduce_from_tensor_model_parallel_region(out, group=self.layout.tp)


class TEReplicated(TEProduct):
    """[T_local, in] -> [T_local, out] with the same weight on every tensor rank."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.set_weight(ctx, Replicated(ctx, inputs, outputs).weight)


class TERMSNorm(RMSNorm):
    """fp32 inside and one rounding at the end. x [..., width]."""

    def __init__(self, ctx: ModelContext, width: int, *, eps: float, on_local_tokens: bool = True) -> None:
        super().__init__(ctx, width, eps=eps, on_local_tokens=on_local_tokens)
        assert isinstance(ctx.backend, TEBackend)
        self.library = ctx.backend.library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.library.rms_norm(x, self.weight, self.eps)


class TEBackend(Backend):
    """transformer-engine; `precision` says which products run in FP8."""

    name = "te"
    column = TEColumn
    row = TERow
    replicated = TEReplicated
    norm = TERMSNorm

    def __init__(self, library: TransformerEngine, precision: Precision) -> None:
        self.library, self.precision = library, precision
        self.recipe = library.recipe(precision.recipe) if precision.recipe is not None else None
        self.notice = f"model.backend=te: transformer-engine {library.version}; products in {precision.describe()}"
        self.caching: list[TEProduct] = []

    def finish(self, model: nn.Module) -> None:
        """Give every product of a built model its recipe, by its name. Sizes that FP8 cannot take stay in BF16."""
        odd = set()
        for name, module in model.named_modules():
            if not self.precision.quantises(name) or not isinstance(module, TEProduct):
                continue
            if any(size % MULTIPLE for size in module.weight.shape):
                odd.add(f"{part_of(name)} {tuple(module.weight.shape)}")
            else:
                module.recipe = self.recipe
                module.caches = self.precision.cache_weights
                if module.caches:
                    self.caching.append(module)
        if odd:
            self.notice += f"; in bf16 too, for sizes that are no multiple of {MULTIPLE}: {', '.join(sorted(odd))}"

    def weights_changed(self) -> None:
        self.library.refresh(self.caching)

    def products(self, asked: Sequence[tuple[nn.Module, torch.Tensor]]) -> list[torch.Tensor]:
        """Those that read one tensor are one function: it is quantised once, and one gradient is added up for all."""
        together: dict[int, list[int]] = {}
        for i, (_, x) in enumerate(asked):
            together.setdefault(id(x), []).append(i)
        found: dict[int, torch.Tensor] = {}
        for places in together.values():
            products: list[Any] = [asked[i][0] for i in places]
            assert not any(isinstance(product, TERow) for product in products)
            found |= zip(places, self.library.linears(asked[places[0]][1], products))
        return [found[i] for i in range(len(asked))]

    def attention(
        self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, stream: PackedStream, scale: float
    ) -> torch.Tensor:
        cu, longest = padded_borders(stream), stream.longest()
        return self.library.attention(q_THK, k_THK, v_THV, cu, cu, longest, longest, scale, at_end=False)

    def suffix_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        n, m = q_NHK.shape[0], k_MHK.shape[0]
        ends = torch.arange(2, dtype=torch.int32, device=q_NHK.device)
        return self.library.attention(q_NHK, k_MHK, v_MHV, ends * n, ends * m, n, m, scale, at_end=n != m)

    def suffixes_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        lengths: Sequence[tuple[int, int]] | int, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Where the host knows that the first document alone began before its queries, it has a call of its own: cuDNN's backward
        of queries aligned with the last keys took 3.4 times what as many pairs of aligned beginnings take."""
        n, m = q_NHK.shape[0], k_MHK.shape[0]
        if isinstance(lengths, int) or len(lengths) == 1 or lengths[0][0] == lengths[0][1]:
            longest = self.longest(lengths, n, m)
            return self.library.attention(q_NHK, k_MHK, v_MHV, cu_q, cu_k, *longest, scale, at_end=n != m)
        (first, known), rest = lengths[0], lengths[1:]
        # split, whose backward is one copy, where that of a slice fills the whole with zeros
        (q_a, q_b), (k_a, k_b), (v_a, v_b) = (
            x.split([cut, x.shape[0] - cut]) for x, cut in ((q_NHK, first), (k_MHK, known), (v_MHV, known))
        )
        borders = cu_q[1:] - first, cu_k[1:] - known
        return torch.cat([
            self.suffixes_attention(q_a, k_a, v_a, cu_q[:2], cu_k[:2], [(first, known)], scale),
            self.suffixes_attention(q_b, k_b, v_b, *borders, rest, scale),
        ])  # fmt: skip

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        low = self.recipe is not None and "experts" not in self.precision.bf16_parts
        if low and x.shape[0] > 0 and not any(size % MULTIPLE for size in weight.shape[1:]):
            return self.library.grouped_product(x, weight, counts, self.recipe)
        return super().grouped_linear(x, weight, counts)


def padded_borders(stream: PackedStream) -> torch.Tensor:
    """cu_seqlens int32 with empty documents at the end, to a power of two of documents.

    cuDNN plans a kernel for every number of documents: this keeps them few.
    """
    if "padded_borders" not in stream.cache:
        cu = stream.cu_seqlens.to(torch.int32)
        documents = cu.shape[0] - 1
        size = rounded_up(documents, 8)
        stream.cache["padded_borders"] = torch.cat([cu, cu[-1:].expand(size - documents)])
    borders = stream.cache["padded_borders"]
    assert isinstance(borders, torch.Tensor)
    return borders
