"""The comparison arm of benchmarks/step.py: megatron-core's own transformer at the active parameters of our model.

GPTModel of megatron-core with its transformer-engine layer specification: multi-latent attention with RoPE, SwiGLU
experts by transformer-engine's grouped linear, fused permutation, fused RoPE and cross entropy, weight gradients added
to the fp32 buffer inside the products, megatron's DDP, distributed optimizer and Adam: what ours trains with. Depth,
width, heads, head dimensions, the dense first layer, places a token and vocabulary are those of our model; experts work
at the full width (there is no latent), and are so many that parameters, and so the memory of weights and optimizer,
about agree; the width of the shared expert is solved for the same active parameters. Without a GPU the local specification
is built instead, so that everything but transformer-engine runs in a test.

`packed`: documents of the stream attend inside themselves, as in ours (thd layout; megatron would pad values to the key
dimension there, which costs it time and which the kernels do not need, so that they are not padded). Not packed: a sequence
is one document (sbhd layout). Steps are launched from Python: megatron cannot capture its dropless experts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "eight": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 8},
}
ROUND = 64
"""The shared expert's width is a multiple of this."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the stock transformer. `shared` is the width of the shared expert of every sparse layer."""

    layers: int
    dense_layers: int
    hidden: int
    dense_hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    experts: int
    top: int
    expert_hidden: int
    shared: int
    vocabulary: int

    @property
    def attention(self) -> int:
        """Matrix parameters of one layer's attention."""
        down = self.hidden * (self.q_rank + self.kv_rank + self.rope)
        up = self.heads * (self.q_rank * (self.nope + self.rope) + self.kv_rank * (self.nope + self.value))
        return down + up + self.heads * self.value * self.hidden

    def active(self) -> dict[str, int]:
        """Matrix parameters a token passes through, by part; the embedding look-up is none."""
        sparse = self.layers - self.dense_layers
        return {
            "attention projections": self.layers * self.attention,
            "dense": self.dense_layers * 3 * self.hidden * self.dense_hidden,
            "router": sparse * self.hidden * self.experts,
            "routed experts": sparse * self.top * 3 * self.hidden * self.expert_hidden,
            "shared expert": sparse * 3 * self.hidden * self.shared,
            "head": self.hidden * self.vocabulary,
        }

    def flops(self, length: int) -> dict[str, float]:
        """Forward FLOPs a token by part: 2 a parameter, and causal attention over the sequence as half of a square."""
        parts = {name: 2.0 * count for name, count in self.active().items()}
        return parts | {"attention": float(self.layers * self.heads * length * (self.nope + self.rope + self.value))}


def shape_of(model: Any) -> Shape:
    """The stock transformer beside `model` (a ModelConfig)."""
    from k3train.config.schema import expand_pattern
    from k3train.planning import parameters

    d, mla, moe = model.hidden_size, model.mla, model.moe
    made = Shape(
        layers=len(expand_pattern(model.pattern, model.hybrid)), dense_layers=model.dense_layers, hidden=d,
        dense_hidden=model.dense_hidden, heads=mla.heads, q_rank=mla.q_lora_rank, kv_rank=mla.kv_lora_rank,
        nope=mla.nope_dim, rope=mla.shared_dim, value=mla.v_dim,
        experts=max(moe.top_k, round(moe.experts * (moe.latent or d) / d)), top=moe.top_k,
        expert_hidden=moe.expert_hidden, shared=0, vocabulary=model.vocab_size,
    )  # fmt: skip
    sparse = made.layers - made.dense_layers
    missing = parameters.count(model).active - sum(made.active().values())
    width = max(ROUND, round(missing / (sparse * 3 * d) / ROUND) * ROUND)
    return Shape(**{**vars(made), "shared": width})


def describe(model: Any, shape: Shape, length: int) -> str:
    """The numerator of the MFU, and the comparison of parameters."""
    from k3train.planning import parameters

    ours, theirs = parameters.count(model).active, sum(shape.active().values())
    parts = shape.flops(length)
    lines = [f"  {name:<22} {value:>11.4g}" for name, value in parts.items()]
    return "\n".join(
        [
            f"megatron-core's transformer: {theirs / 1e6:.1f} M active parameters, ours {ours / 1e6:.1f} M "
            f"({theirs / ours - 1:+.2%}); {shape.experts} experts of width {shape.expert_hidden} at {shape.hidden}, "
            f"shared expert {shape.shared}",
            f"model FLOPs a token at sequence length {length} = 3 x forward = {3 * sum(parts.values()):.4g}; forward:",
            *lines,
        ]
    )


class PlainAttention(nn.Module):
    """Stands in for transformer-engine's attention on a CPU: megatron's own takes no head dimensions that differ."""

    def __init__(self, *_: Any, softmax_scale: float, **options: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, packed_seq_params: Any = None, **options: Any
    ) -> torch.Tensor:
        """[t, heads, size] with packed documents, else [s, b, heads, size]."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        place = torch.arange(q.shape[1])
        document = torch.bucketize(place, packed_seq_params.cu_seqlens_q.long(), right=True)
        mask = (document[:, None] == document) & (place[:, None] >= place)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(0, 1)


def build(shape: Shape, layout: Any, device: torch.device, *, length: int, recompute: str) -> tuple[nn.Module, Any]:
    """GPTModel on the device, in bf16 on a GPU and fp32 on a CPU, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    cuda = device.type == "cuda"
    # megatron chooses its attention by itself and refuses where one of these is set, as our backend does
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    dtype = torch.bfloat16 if cuda else torch.float32
    multi_latent_attention._prepare_mla_core_attention_value = lambda _, query, value, packed: (value, False, 0, 0)
    model_parallel_cuda_manual_seed(1234)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = MLATransformerConfig(
            num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
            ffn_hidden_size=shape.dense_hidden, q_lora_rank=shape.q_rank, kv_lora_rank=shape.kv_rank,
            qk_head_dim=shape.nope, qk_pos_emb_head_dim=shape.rope, v_head_dim=shape.value,
            # YaRN at scale 1 is RoPE, and the form whose kernel is fused
            rope_type="yarn", rotary_scaling_factor=1.0, original_max_position_embeddings=length,
            mscale=1.0, mscale_all_dim=1.0, apply_rope_fusion=cuda, qk_layernorm=True,
            num_moe_experts=shape.experts, moe_router_topk=shape.top, moe_ffn_hidden_size=shape.expert_hidden,
            moe_shared_expert_intermediate_size=shape.shared,
            moe_layer_freq=[0] * shape.dense_layers + [1] * (shape.layers - shape.dense_layers),
            moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_router_dtype="fp32",
            moe_grouped_gemm=cuda, moe_permute_fusion=cuda, moe_router_fusion=cuda,
            moe_token_dispatcher_type="alltoall",
            cross_entropy_loss_fusion=cuda, cross_entropy_fusion_impl="te" if cuda else "native",
            bf16=cuda, params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=not cuda,
            gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=cuda, add_bias_linear=False,
            normalization="RMSNorm", layernorm_epsilon=1e-5, hidden_dropout=0.0, attention_dropout=0.0,
            bias_dropout_fusion=cuda, masked_softmax_fusion=False, gradient_accumulation_fusion=cuda and fused_wgrad(),
            calculate_per_token_loss=True, transformer_impl="transformer_engine" if cuda else "local",
            **RECOMPUTE[recompute],
        )  # fmt: skip
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=cuda, normalization="RMSNorm")
        if not cuda:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = PlainAttention
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=shape.vocabulary, max_sequence_length=length,
            position_embedding_type="rope", pg_collection=layout.groups,
        )  # fmt: skip
    if cuda:
        model = Float16Module(config, model.cuda())
    return model, config


def fused_wgrad() -> bool:
    """Let megatron's own linear (the head) add its weight gradient to the fp32 buffer as well: it asks apex for that
    product, and transformer-engine has the same one."""
    from megatron.core.tensor_parallel import layers

    if getattr(layers, "_grad_accum_fusion_available", False):
        return True
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        return False

    def add(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        general_gemm(x, dy, out_dtype=main_grad.dtype, layout="NT", out=main_grad, grad=True, accumulate=True)

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    return True


class StockEngine:
    """One rank of megatron-core's transformer, in the shape of the engine that benchmarks/step.py times."""

    def __init__(
        self, config: Any, layout: Any, device: torch.device, *, packed: bool = True, recompute: str = "none"
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config, self.layout, self.device, self.packed = config, layout, device, packed
        self.length, self.recompute = config.train.seq_length, recompute
        self.shape = shape_of(config.model)
        model, megatron = build(self.shape, layout, device, length=self.length, recompute=recompute)
        model.model_type = ModelType.encoder_or_decoder
        self.models = [model]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.ddp = [DistributedDataParallel(megatron, ddp, model)]
        megatron.finalize_model_grads_func = finalize_model_grads
        optim = config.optim
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1.0, min_lr=0.0, weight_decay=optim.weight_decay, adam_beta1=optim.beta1,
                adam_beta2=optim.beta2, adam_eps=optim.eps, clip_grad=optim.clip_grad, bf16=megatron.bf16,
                params_dtype=megatron.params_dtype, use_distributed_optimizer=True,
            ),
            self.ddp,
        )  # fmt: skip
        self.ctx = SimpleNamespace(megatron=megatron)

    def micro_batches(self, samples: int) -> int:
        return samples // (self.config.train.micro_batch * self.layout.sizes.data)

    def forward(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        """What megatron's schedule calls for a micro-batch."""
        from k3train.engine.graphs import pad_documents, to_device

        batch = next(batches)
        batch = to_device({**batch, "cu_seqlens": pad_documents(batch["cu_seqlens"])}, self.device)
        rows = (1, -1) if self.packed else (-1, self.length)
        tokens, labels, mask = (batch[name].view(*rows) for name in ("tokens", "labels", "loss_mask"))
        places = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        losses = model(
            tokens, places, None, labels=labels,
            packed_seq_params=packed_documents(batch["cu_seqlens"], self.length) if self.packed else None,
        )  # fmt: skip

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total, count = (output.view_as(mask).float() * mask).sum(), mask.sum()
            return total, count.int(), {"sums": torch.stack([total.detach(), count]).double()}

        return losses, loss_func

    def step(self, batches: Iterator[dict[str, torch.Tensor]], lr: float, micro_batches: int) -> Any:
        """Forward and backward of all micro-batches, gradient norm and clipping, update."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        train = self.config.train
        self.ddp[0].train()
        self.ddp[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=self.forward, data_iterator=batches, model=self.ddp[0], num_microbatches=micro_batches,
            seq_length=train.seq_length, micro_batch_size=train.micro_batch, forward_only=False,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.optim.weight_decay * group.get("wd_mult", 1.0)
        applied, norm, _ = self.optimizer.step()
        total, count = torch.stack([out["sums"] for out in outputs]).sum(0).tolist()
        return SimpleNamespace(loss=total / max(count, 1.0), grad_norm=norm, skipped=not applied, load=None)


def packed_documents(cu_seqlens: torch.Tensor, longest: int) -> Any:
    """megatron's description of a stream of documents: cu_seqlens int32 [N + 1] on the device."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest,
        pad_between_seqs=False,
    )  # fmt: skip
