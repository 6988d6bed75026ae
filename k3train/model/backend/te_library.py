"""transformer-engine as this project calls it: a handful of functions, so that the rest can be tested without it.

`TransformerEngine` is what the backend needs; `load` gives it from the installed library, or says why it cannot.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from k3train.errors import EnvironmentError_
from k3train.model.backend.te_linear import Asked, Linears

INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]' under the torch in use"


class TransformerEngine(Protocol):
    """What of transformer-engine the backend uses."""

    version: str

    def recipe(self, name: str) -> object:
        """The recipe of `train.precision`. Raises RuntimeError with the library's reason where it cannot run here."""

    def linears(self, x: torch.Tensor, products: Sequence[Asked]) -> list[torch.Tensor]:
        """x [N, in] -> [N, out] for each product that reads it, in FP8 where it has a recipe."""

    def refresh(self, products: Sequence[Asked]) -> None:
        """New weights: quantise the kept ones again, in place, and forget what the backward before left behind."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [N, width]: fp32 inside, one rounding."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
        max_k: int, scale: float, *, at_end: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Causal inside documents, queries aligned with the first keys or (at_end) with the last."""

    def grouped_product(
        self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, recipe: object
    ) -> torch.Tensor:
        """Rows of x sorted by expert, counts [E] of them each, times weight [E, out, in], in FP8."""


def installed_cores() -> list[str]:
    """CUDA major versions of the installed transformer-engine cores: ["13"]."""
    found = []
    for major in ("11", "12", "13", "14"):
        try:
            importlib.metadata.distribution(f"transformer-engine-cu{major}")
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(major)
    return found


def load(
    *, find: Callable[[str], Any] = importlib.util.find_spec, cores: Callable[[], list[str]] = installed_cores,
    make: Callable[[], TransformerEngine] | None = None, cuda: str | None = torch.version.cuda,
) -> TransformerEngine:  # fmt: skip
    """The installed library. Raises EnvironmentError_: not there, or built for another CUDA or another torch."""
    if find("transformer_engine") is None:
        raise EnvironmentError_(f"transformer-engine is not installed ({INSTALL})")
    majors, ours = cores(), (cuda or "none").split(".")[0]
    if majors and ours not in majors:
        raise EnvironmentError_(
            f"the installed transformer-engine is built for CUDA {' and '.join(majors)}, torch {torch.__version__} for "
            f"CUDA {cuda}; install transformer-engine[pytorch,core_cu{ours}]"
        )
    try:
        return (make or _Installed)()
    except (ImportError, OSError) as error:  # undefined symbols, missing libraries
        raise EnvironmentError_(
            f"the installed transformer-engine does not load under torch {torch.__version__}, CUDA {cuda} "
            f"({str(error).strip().splitlines()[-1][:160]}): it was built for another torch or CUDA; rebuild it ({INSTALL})"
        ) from error
    except (AssertionError, RuntimeError) as error:  # its own checks of versions
        raise EnvironmentError_(
            f"the installed transformer-engine does not start: {str(error).strip().splitlines()[0][:200]} ({INSTALL})"
        ) from error


class _Installed:
    """The real one. Nothing here runs without a GPU."""

    def __init__(self) -> None:
        if os.environ.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0") not in ("", "0"):
            raise RuntimeError("NVTE_CUTEDSL_FUSED_GROUPED_MLP fuses SwiGLU into experts, which is not SiTU; unset it")
        # a shape that no fused kernel takes is an error, not a silent quadratic fallback
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        self.te = importlib.import_module("transformer_engine.pytorch")
        self.tex = importlib.import_module("transformer_engine_torch")
        self.recipes = importlib.import_module("transformer_engine.common.recipe")
        self.version = importlib.metadata.version("transformer-engine")
        self._attention: dict[tuple[Any, ...], Any] = {}
        self._norm = _norm_function(self.tex)
        self._grouped = _grouped_function(self.te, self.tex)
        self._linears = Linears(self.te)

    def recipe(self, name: str) -> object:
        quantization = importlib.import_module("transformer_engine.pytorch.quantization")
        made = {
            "fp8_block": self.recipes.Float8BlockScaling,
            "fp8_current": self.recipes.Float8CurrentScaling,
            "mxfp8": self.recipes.MXFP8BlockScaling,
        }[name]()
        quantization.check_recipe_support(made)
        return made

    def linears(self, x: torch.Tensor, products: Sequence[Asked]) -> list[torch.Tensor]:
        return self._linears(x, products)

    def refresh(self, products: Sequence[Asked]) -> None:
        self._linears.forget()
        for product in products:
            if product.kept is not None:
                self._linears.refresh(product)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm.apply(x, weight, eps)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
        max_k: int, scale: float, *, at_end: bool,
    ) -> torch.Tensor:  # fmt: skip
        key = (q.shape[1], q.shape[2], v.shape[2], scale, at_end)
        if key not in self._attention:
            self._attention[key] = self.te.DotProductAttention(
                q.shape[1], (q.shape[2], v.shape[2]), attention_dropout=0.0, qkv_format="thd", softmax_scale=scale,
                attn_mask_type="padding_causal_bottom_right" if at_end else "padding_causal", layer_number=1,
            )  # fmt: skip
        out = self._attention[key](
            q.contiguous(), _at_start(k), _at_start(v), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k, max_seqlen_q=max_q,
            max_seqlen_kv=max_k, pad_between_seqs=False,
        )  # fmt: skip
        return out.view(q.shape[0], q.shape[1], v.shape[2])

    def grouped_product(
        self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, recipe: object
    ) -> torch.Tensor:
        rows = counts.tolist()  # this grouped product of cuBLAS takes its sizes from the host
        experts = len(rows)
        padded, sizes = self.te.Fp8Padding(experts, _ROWS)(x, rows)
        out = self._grouped.apply(padded, weight, sizes, recipe, torch.is_grad_enabled())
        return self.te.Fp8Unpadding(experts, _ROWS)(out, rows)


def _at_start(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and at the start of its storage: of keys and values that lie further on, as those of a rank's documents
    do under context parallelism, transformer-engine says that their layout is not supported."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() else x


_ROWS = 16
"""Rows of an expert are padded to a multiple of this: the products of the backward sum over them."""


def _norm_function(tex: Any) -> Any:
    """transformer-engine's RMSNorm kernels as a function: te.RMSNorm owns its weight and costs more on the host."""
    from transformer_engine.pytorch.constants import TE_DType

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            flat = x.contiguous().view(-1, x.shape[-1])
            y, _, rstd = tex.rmsnorm_fwd(flat, weight, eps, None, None, TE_DType[x.dtype], 0, False)
            ctx.save_for_backward(flat, weight, rstd)
            return y.view(x.shape)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            flat, weight, rstd = ctx.saved_tensors
            dx, dw = tex.rmsnorm_bwd(dy.contiguous().view(flat.shape), flat, rstd, weight, 0, False)
            return dx.view(dy.shape), dw, None

    return Norm


def _grouped_function(te: Any, tex: Any) -> Any:
    """The grouped products of te.GroupedLinear over one stacked weight (it would own a parameter an expert)."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
    from transformer_engine.pytorch.module.base import get_dummy_wgrad
    from transformer_engine.pytorch.quantization import RecipeState

    def quantizers(recipe: Any, mode: str, experts: int) -> list[list[Any]]:
        """Forward: inputs, weights, outputs; backward: output gradients, input gradients. One an expert."""
        kinds = 3 if mode == "forward" else 2
        made = RecipeState.create(recipe, mode=mode, num_quantizers=kinds * experts).make_quantizers()
        for quantizer in made:
            quantizer.internal = True
        return [made[kind::kinds] for kind in range(kinds)]

    def quantise(x: torch.Tensor, sizes: list[int], by: list[Any], *, rowwise: bool, columnwise: bool) -> list[Any]:
        for quantizer in by:
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
            quantizer.optimize_for_gemm = True
        return tex.split_quantize(x, sizes, by)

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, sizes: list[int], recipe: Any, training: bool
        ) -> torch.Tensor:
            experts, out_features, in_features = weight.shape
            inputs, weights, _ = quantizers(recipe, "forward", experts)
            x_low = quantise(x.contiguous(), sizes, inputs, rowwise=True, columnwise=training)
            stacked = weight.reshape(experts * out_features, in_features)
            w_low = quantise(stacked, [out_features] * experts, weights, rowwise=True, columnwise=training)
            out = x.new_empty(x.shape[0], out_features)
            general_grouped_gemm(
                w_low, x_low, [out], [None] * experts, x.dtype, m_splits=sizes, single_output=True,
                use_split_accumulator=recipe.fp8_gemm_fprop.use_split_accumulator,
            )  # fmt: skip
            if not training:
                return out
            for tensor in x_low:
                tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
            # through save_for_backward, so that a recomputed layer does not keep them
            tensors, ctx.tensor_objects = te.prepare_for_saving(*x_low, *w_low)
            ctx.save_for_backward(*tensors)
            ctx.weight, ctx.sizes, ctx.recipe = weight, sizes, recipe
            return out

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            weight, sizes, recipe = ctx.weight, ctx.sizes, ctx.recipe
            experts, _, in_features = weight.shape
            low = te.restore_from_func_ctx(ctx)
            x_low, w_low = low[:experts], low[experts:]
            by, _ = quantizers(recipe, "backward", experts)
            dy_low = quantise(dy.contiguous(), sizes, by, rowwise=True, columnwise=True)
            dx = dy.new_empty(dy.shape[0], in_features)
            for tensor in w_low:
                tensor.update_usage(columnwise_usage=True)
            general_grouped_gemm(
                w_low, dy_low, [dx], [None] * experts, dy.dtype, layout="NN", m_splits=sizes, grad=True,
                single_output=True, use_split_accumulator=recipe.fp8_gemm_dgrad.use_split_accumulator,
            )  # fmt: skip
            fused = hasattr(weight, "main_grad")
            dw = weight.main_grad if fused else torch.empty_like(weight)
            if not fused and 0 in sizes:
                dw.zero_()
            general_grouped_gemm(
                x_low, dy_low, list(dw.unbind(0)), [None] * experts, dy.dtype, layout="NT", m_splits=sizes,
                grad=True, accumulate=fused, use_split_accumulator=recipe.fp8_gemm_wgrad.use_split_accumulator,
            )  # fmt: skip
            if fused:
                weight.grad_added_to_main_grad = True
                dw = get_dummy_wgrad(list(weight.shape), weight.dtype)
            return dx, dw, None, None, None

    return Grouped
