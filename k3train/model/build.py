"""From the composed configuration to a model: megatron's config, the chunk of layers of this rank, the context."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.config.precision import Precision
from k3train.config.schema import ModelConfig, expand_pattern
from k3train.model.attention_residuals import source_ends_before, tensors_before_layer
from k3train.model.backend import make_backend
from k3train.model.context import ModelContext
from k3train.model.k3 import K3Model
from k3train.model.parameters import initialize_parameters
from k3train.parallel.expert_exchange import ExchangePlan
from k3train.parallel.layout import Layout, Sizes
from k3train.parallel.pipeline import Chunk, split_layers
from k3train.parallel.transport import Borders, StageLink, borders
from k3train.planning.parameters import layer_costs


def megatron_config(model: ModelConfig, sizes: Sizes, dtype: torch.dtype, *, on_cpu: bool) -> TransformerConfig:
    """The part of megatron's configuration that its linears, dispatcher, DDP, optimizer and schedules read."""
    layers = len(expand_pattern(model.pattern, model.hybrid))
    interleaved = sizes.virtual > 1
    return TransformerConfig(
        num_layers=layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.mla.heads,
        ffn_hidden_size=model.dense_hidden,
        num_moe_experts=model.moe.experts,
        moe_router_topk=model.moe.top_k,
        moe_ffn_hidden_size=model.moe.expert_hidden,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if interleaved else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        # with virtual stages it would hold compute back until every sent tensor has arrived: see transport._Sent
        deallocate_pipeline_outputs=sizes.pipeline > 1 and not interleaved,
        # batched p2p between two stages is ambiguous in the interleaved schedule and silently wrong
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def stage_ranges(model: ModelConfig, sizes: Sizes, layout: str | None) -> list[tuple[int, int]]:
    """Layers [first, last) of every stage, in the order data flows: as `layout` says, else balanced by cost."""
    costs = layer_costs(model)
    return split_layers(len(costs), sizes.pipeline * sizes.virtual, layout, costs, pipeline=sizes.pipeline)


def chunks_of_rank(model: ModelConfig, sizes: Sizes, rank: int, layout: str | None) -> list[Chunk]:
    """The model chunks of pipeline rank `rank`, one a virtual stage."""
    ranges = stage_ranges(model, sizes, layout)
    total = len(ranges)
    stages = [v * sizes.pipeline + rank for v in range(sizes.virtual)]
    return [Chunk(s, *ranges[s], embeds=s == 0, heads=s == total - 1) for s in stages]


def stage_borders(model: ModelConfig, sizes: Sizes, layout: str | None, transport: str) -> Borders:
    """How many tensors of the depth state cross each border of the pipeline."""
    mode, block = model.attention_residuals, model.residual_block
    return borders(
        stage_ranges(model, sizes, layout), sizes.pipeline, transport,
        lambda layer: tensors_before_layer(mode, layer, block), lambda layer: source_ends_before(mode, layer, block),
    )  # fmt: skip


def link_stages(models: list[K3Model], table: Borders) -> None:
    """Give each chunk of this rank its borders; a chunk takes what the one before it on the rank has kept."""
    earlier = None
    for model in models:
        model.link = earlier = StageLink(table, model.chunk.stage, earlier)


def make_context(
    model: ModelConfig, layout: Layout, dtype: torch.dtype, device: torch.device, *, recompute: str = "none",
    recompute_layers: int | None = None, activations: dict[str, str] | None = None, precision: Precision | None = None,
    exchange: ExchangePlan | None = None,
) -> ModelContext:  # fmt: skip
    """The shared context of this rank's modules. `precision` says which products run in FP8 (none without it),
    `activations` what backward keeps by class of tensor (`config.activations.policies`; without it as recompute says),
    `exchange` how rows reach the experts of other ranks (without it through megatron-core's dispatcher)."""
    config = megatron_config(model, layout.sizes, dtype, on_cpu=device.type != "cuda")
    head_dims = model.mla.nope_dim + model.mla.shared_dim, model.mla.v_dim
    backend = make_backend(model.backend, device, dtype=dtype, precision=precision, head_dims=head_dims)
    return ModelContext(
        model, config, layout, backend, dtype, device, recompute=recompute, recompute_layers=recompute_layers,
        activations=activations or {}, exchange=exchange or ExchangePlan(),
    )  # fmt: skip


def build_chunks(ctx: ModelContext, chunks: list[Chunk], *, seed: int) -> list[K3Model]:
    """Build and initialise this rank's chunks on its device."""
    models = []
    for v, chunk in enumerate(chunks):
        with ctx.device:
            model = K3Model(ctx, chunk, virtual_stage=v if len(chunks) > 1 else None)
        initialize_parameters(model, ctx.layout, seed)
        ctx.backend.finish(model)
        models.append(model)
    return models


def build_meta(model: ModelConfig, layout: Layout) -> K3Model:
    """The whole model on the meta device: shapes and counts, no memory and no initialisation."""
    ctx = make_context(dataclasses.replace(model, backend="local"), layout, torch.bfloat16, torch.device("meta"))
    layers = len(expand_pattern(model.pattern, model.hybrid))
    with torch.device("meta"):
        return K3Model(ctx, Chunk(0, 0, layers, embeds=True, heads=True), virtual_stage=None)
