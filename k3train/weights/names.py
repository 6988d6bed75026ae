"""The one table between our parameter names and those of Hugging Face checkpoints.

Two formats exist: ``kimi_k3`` (the released Kimi K3 text backbone) and ``kimi_linear`` (Kimi Linear 48B-A3B, as
transformers' own KimiLinear class reads it). They share the names of a layer and differ in the prefix, in the name of
the head and in the shape of A_log. What a model has of the optional tensors (latent projections, output gates, residual
attention, ...) follows from its configuration, so the same table serves every switch.

Dimension letters of the table:

    d hidden   v vocabulary   f dense MLP   e experts   m expert   s shared MLP   l latent (d without latent experts)
    H KDA heads   K KDA head size   P = H * K   W convolution taps   H128 = H rounded up to a multiple of 128
    Q query LoRA   C key-value latent   QK = heads * (nope + shared)   KV = heads * (nope + value)   O = heads * value
    CS = latent + shared slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3train.config.schema import ModelConfig, expand_pattern
from k3train.errors import ConfigError, WeightsError

FORMATS = ("kimi_k3", "kimi_linear")
A_LOG_MULTIPLE = 128  # the release pads the per-head decay rates with zeros to a multiple of this
BF16, F32 = torch.bfloat16, torch.float32

# Parts of the multimodal release that the text backbone does not have.
FOREIGN_PREFIXES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")

Dims = tuple["str | int", ...]


@dataclass(frozen=True)
class Row:
    """One line of the table; `hf_dims` is the stored shape where it differs from ours."""

    ours: str
    hf: str
    dims: Dims
    hf_dims: Dims | None = None
    dtype: torch.dtype = BF16


def _same(names: str, dims: Dims, dtype: torch.dtype = BF16) -> list[Row]:
    return [Row(f"{name}.weight", f"{name}.weight", dims, dtype=dtype) for name in names.split()]


KDA = [
    *_same("q_proj k_proj v_proj", ("P", "d")),
    *(Row(f"{x}_conv", f"{x}_conv1d.weight", ("P", "W"), ("P", 1, "W"), F32) for x in "qkv"),
    *_same("f_a_proj", ("K", "d")),
    *_same("f_b_proj", ("P", "K")),
    Row("dt_bias", "dt_bias", ("H", "K"), ("P",), F32),
    *_same("b_proj", ("H", "d")),
    Row("o_norm", "o_norm.weight", ("K",), dtype=F32),
    *_same("o_proj", ("d", "P")),
]
KDA_A_LOG = {
    "kimi_k3": Row("A_log", "A_log", ("H",), ("H128",), F32),
    "kimi_linear": Row("A_log", "A_log", ("H",), (1, 1, "H", 1), F32),
}
KDA_GATE = {
    "full": _same("g_proj", ("P", "d")),
    "low_rank": [*_same("g_a_proj", ("K", "d")), *_same("g_b_proj", ("P", "K"))],
}
MLA = [
    Row("kv_a_proj.weight", "kv_a_proj_with_mqa.weight", ("CS", "d")),
    Row("kv_a_norm.weight", "kv_a_layernorm.weight", ("C",)),
    *_same("kv_b_proj", ("KV", "C")),
    *_same("o_proj", ("d", "O")),
]
MLA_QUERY = _same("q_proj", ("QK", "d"))
MLA_QUERY_LORA = [
    *_same("q_a_proj", ("Q", "d")),
    Row("q_a_norm.weight", "q_a_layernorm.weight", ("Q",)),
    *_same("q_b_proj", ("QK", "Q")),
]
MLA_GATE = _same("g_proj", ("O", "d"))
DENSE = [*_same("gate_proj up_proj", ("f", "d")), *_same("down_proj", ("d", "f"))]
MOE = [
    Row("router.weight", "gate.weight", ("e", "d")),
    Row("router.bias", "gate.e_score_correction_bias", ("e",), dtype=F32),
]
MOE_SHARED = [
    *_same("shared_experts.gate_proj shared_experts.up_proj", ("s", "d")),
    *_same("shared_experts.down_proj", ("d", "s")),
]
MOE_LATENT = [
    Row("latent_down.weight", "routed_expert_down_proj.weight", ("l", "d")),
    Row("latent_up.weight", "routed_expert_up_proj.weight", ("d", "l")),
]
MOE_LATENT_NORM = [Row("latent_norm.weight", "routed_expert_norm.weight", ("l",))]
# Stacked [experts, out, in] in ours, one tensor an expert in the checkpoint. w1 is the gate, w3 the up projection.
EXPERTS = [
    Row("experts.w1", "experts.{e}.w1.weight", ("m", "l")),
    Row("experts.w3", "experts.{e}.w3.weight", ("m", "l")),
    Row("experts.w2", "experts.{e}.w2.weight", ("l", "m")),
]


def _residual(ours: str, hf: str) -> list[Row]:
    return [
        Row(f"{ours}.query", f"{hf}_proj.weight", ("d",), (1, "d")),
        Row(f"{ours}.norm_weight", f"{hf}_norm.weight", ("d",)),
    ]


LAYER = [
    Row("input_norm.weight", "input_layernorm.weight", ("d",)),
    Row("post_attention_norm.weight", "post_attention_layernorm.weight", ("d",)),
]
LAYER_RESIDUALS = [
    *_residual("attention_residual", "self_attention_res"),
    *_residual("mlp_residual", "mlp_res"),
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Hugging Face tensor and where it lives in our state.

    ours: our parameter name; expert: index on its first axis, or None for the whole parameter.
    shape: of the (expert's) parameter in ours; hf_shape, dtype: as stored in the checkpoint.
    """

    ours: str
    expert: int | None
    hf: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_routed_expert(self) -> bool:
        """Whether the tensor is one of w1, w2, w3 of a routed expert: the ones that MXFP4 packs."""
        return self.expert is not None

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Our tensor, `shape`, as the checkpoint stores it: `hf_shape` and `dtype` (float32 rounds to bfloat16)."""
        if tuple(tensor.shape) != self.shape:
            raise WeightsError(f"{self.ours}: shape {list(tensor.shape)}, the configuration says {list(self.shape)}")
        if self._padded:
            tensor = torch.cat([tensor, tensor.new_zeros(self.hf_shape[0] - self.shape[0])])
        return tensor.reshape(self.hf_shape).to(self.dtype).contiguous()

    def from_hf(self, tensor: Tensor) -> Tensor:
        """A stored tensor, `hf_shape`, in our shape; the dtype stays.

        Raises WeightsError for another shape, and for A_log padding that is not zero.
        """
        self.check_shape(tuple(tensor.shape))
        if self._padded:
            if tensor[self.shape[0] :].any():
                raise WeightsError(
                    f"{self.hf}: entries {self.shape[0]}..{self.hf_shape[0] - 1} must be zero padding for "
                    f"{self.shape[0]} heads, but some are not; check num_heads in linear_attn_config"
                )
            tensor = tensor[: self.shape[0]]
        return tensor.reshape(self.shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise WeightsError unless `shape` is the stored shape that the configuration asks for."""
        if tuple(shape) != self.hf_shape:
            raise WeightsError(
                f"{self.hf}: shape {list(shape)}, but config.json asks for {list(self.hf_shape)}; "
                "the file and its configuration do not belong together"
            )

    @property
    def _padded(self) -> bool:
        return len(self.shape) == len(self.hf_shape) == 1 and self.shape != self.hf_shape


def entries(model: ModelConfig, format: str = "kimi_k3") -> Iterator[Entry]:
    """Every tensor of the model in checkpoint order: embedding, layers from first to last, final norm, head."""
    if format not in FORMATS:
        raise ConfigError(f"export.format={format!r} is unknown; choose one of {', '.join(FORMATS)}")
    sizes = _sizes(model)
    prefix = "language_model.model." if format == "kimi_k3" else "model."

    def make(row: Row, ours: str, hf: str, expert: int | None = None) -> Entry:
        shape = _shape(row.dims, sizes)
        stored = shape if row.hf_dims is None else _shape(row.hf_dims, sizes)
        return Entry(ours + row.ours, expert, hf + row.hf.replace("{e}", str(expert)), shape, stored, row.dtype)

    yield make(Row("embedding.weight", "embed_tokens.weight", ("v", "d")), "", prefix)
    for i, kind in enumerate(expand_pattern(model.pattern, model.hybrid)):
        for group, ours, hf in _layer_rows(model, format, kind, dense=i < model.dense_layers):
            for row in group:
                yield make(row, f"layers.{i}.{ours}", f"{prefix}layers.{i}.{hf}")
        if i >= model.dense_layers:
            for expert in range(model.moe.experts):
                for row in EXPERTS:
                    yield make(row, f"layers.{i}.moe.", f"{prefix}layers.{i}.block_sparse_moe.", expert)
    if model.attention_residuals != "off":
        for row in _residual("output_residual", "output_attn_res"):
            yield make(row, "", prefix)
    yield make(Row("final_norm.weight", "norm.weight", ("d",)), "", prefix)
    yield make(Row("lm_head.weight", "lm_head.weight", ("v", "d")), "", prefix.removesuffix("model."))


def _layer_rows(model: ModelConfig, format: str, kind: str, *, dense: bool) -> Iterator[tuple[list[Row], str, str]]:
    """Groups of rows of one layer with our prefix and theirs inside the layer; routed experts come after."""
    yield LAYER, "", ""
    if model.attention_residuals != "off":
        yield LAYER_RESIDUALS, "", ""
    if kind == "K":
        rows = [KDA_A_LOG[format], *KDA, *KDA_GATE[model.kda.output_gate]]
    else:
        rows = [*MLA, *(MLA_QUERY if model.mla.q_lora_rank is None else MLA_QUERY_LORA)]
        rows += MLA_GATE if model.mla.output_gate else []
    yield rows, "attention.", "self_attn."
    if dense:
        yield DENSE, "mlp.", "mlp."
        return
    yield MOE, "moe.", "block_sparse_moe."
    if model.moe.shared_experts:
        yield MOE_SHARED, "moe.", "block_sparse_moe."
    if model.moe.latent is not None:
        yield MOE_LATENT, "moe.", "block_sparse_moe."
        if model.moe.latent_norm:
            yield MOE_LATENT_NORM, "moe.", "block_sparse_moe."


def _sizes(model: ModelConfig) -> dict[str, int]:
    kda, mla, moe = model.kda, model.mla, model.moe
    latent = model.hidden_size if moe.latent is None else moe.latent
    return {
        "d": model.hidden_size,
        "v": model.vocab_size,
        "f": model.dense_hidden,
        "e": moe.experts,
        "l": latent,
        "m": moe.expert_hidden,
        "s": moe.shared_experts * moe.expert_hidden,
        "H": kda.heads,
        "H128": -(-kda.heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,
        "K": kda.head_dim,
        "P": kda.heads * kda.head_dim,
        "W": kda.conv_size,
        "Q": mla.q_lora_rank or 0,
        "C": mla.kv_lora_rank,
        "CS": mla.kv_lora_rank + mla.shared_dim,
        "QK": mla.heads * (mla.nope_dim + mla.shared_dim),
        "KV": mla.heads * (mla.nope_dim + mla.v_dim),
        "O": mla.heads * mla.v_dim,
    }


def _shape(dims: Dims, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims)
