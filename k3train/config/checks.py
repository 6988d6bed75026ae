"""What a configuration must satisfy, checked before a process group exists.

Each check raises with what is wrong, the value, and what to type. `k3train.parallel` may rely on every rule here.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from k3train.config.activations import check_activations, check_recompute
from k3train.config.precision import MULTIPLE, precision_of
from k3train.config.schema import Config, expand_pattern
from k3train.errors import ConfigError, DataError, LayoutError

BOUND_FLOOR = -5.9  # exp(-(16 * 5.9)) is the smallest tile factor whose inverse bf16 and fp32 still hold
GROUP = 32  # elements that share one MXFP4 scale


def check(config: Config, world_size: int | None = None) -> None:
    """Check everything that needs no file and no device.

    world_size: the number of ranks that will really run; without it, parallel.world or the smallest that fits.
    Raises ConfigError, or LayoutError for sizes that do not divide.
    """
    _check_ranges(config)
    _check_model(config)
    _check_training(config)
    _check_precision(config)
    _check_graphs(config)
    check_activations(config.train)
    check_recompute(config.train, len(layers(config)))
    if config.parallel.auto and world_size is None and config.parallel.world is None:
        return  # sizes are proposed once the number of ranks is known, and checked then
    if config.parallel.auto:
        return
    _check_layout(config)
    world = ranks(config, world_size)
    _check_batch(config, world)
    _check_engine(config, world)


def layers(config: Config) -> str:
    """The expanded layer pattern, one letter a layer. Raises ConfigError."""
    try:
        return expand_pattern(config.model.pattern, config.model.hybrid)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def ranks(config: Config, available: int | None = None) -> int:
    """Number of ranks of the run: parallel.world, else `available`, else parallel.data's, else the smallest that fits.

    available: what a launcher gives (torchrun, Slurm). Raises LayoutError where they contradict each other.
    """
    p = config.parallel
    model_ranks = p.tensor * p.pipeline * p.context
    if p.world is not None and available is not None and p.world != available:
        raise LayoutError(
            f"parallel.world={p.world}, but the launcher started {available} ranks; type parallel.world={available}, "
            "or leave parallel.world out"
        )
    world = p.world if p.world is not None else available
    if world is None:
        world = model_ranks * (p.data if p.data is not None else _smallest_data(config))
    if world % model_ranks:
        near = max(1, world // model_ranks) * model_ranks
        raise LayoutError(
            f"{world} ranks do not divide by tensor*pipeline*context = {p.tensor}*{p.pipeline}*{p.context} = "
            f"{model_ranks}; run {near} ranks (parallel.world={near}) or change the sizes"
        )
    data = world // model_ranks
    if p.data is not None and p.data != data:
        raise LayoutError(
            f"parallel.data={p.data}, but {world} ranks / ({p.tensor}*{p.pipeline}*{p.context}) = {data}; type "
            f"parallel.data={data} or parallel.world={p.data * model_ranks}"
        )
    if (p.tensor * p.context * data) % p.expert:
        fitting = _divisors(p.tensor * p.context * data)
        raise LayoutError(
            f"parallel.expert={p.expert} must divide the ranks of one pipeline stage, tensor*context*data = "
            f"{p.tensor}*{p.context}*{data} = {p.tensor * p.context * data}; type parallel.expert={fitting[-1]} "
            f"(or one of {fitting}), or parallel.world={model_ranks * _smallest_data(config)}"
        )
    return world


def data_parallel(config: Config, available: int | None = None) -> int:
    """Data-parallel size (ranks that see different sequences). Raises LayoutError as `ranks`."""
    p = config.parallel
    return ranks(config, available) // (p.tensor * p.pipeline * p.context)


def micro_batches(config: Config, available: int | None = None) -> int:
    """Micro-batches a rank runs in one optimizer step."""
    return config.train.global_batch // (config.train.micro_batch * data_parallel(config, available))


def sequence_parallel(config: Config) -> bool:
    """Whether sequence parallelism is on: parallel.sequence, else on with tensor > 1."""
    p = config.parallel
    return p.tensor > 1 if p.sequence is None else p.sequence


def stage_layers(config: Config) -> list[int] | None:
    """Layers of each of the pipeline*virtual stages from parallel.pipeline_layout, or None where it names none.

    Stages are in the model's order; stage s runs on pipeline rank s % pipeline as its chunk s // pipeline.
    """
    text = config.parallel.pipeline_layout
    if text is None or text == "even":
        return None
    pattern, stages = layers(config), config.parallel.pipeline * config.parallel.virtual
    parts = ["".join(part.split()) for part in text.split("|")]
    example = _example_layout(pattern, stages)
    if len(parts) != stages:
        raise LayoutError(
            f"parallel.pipeline_layout has {len(parts)} stages, and pipeline*virtual = {config.parallel.pipeline}*"
            f"{config.parallel.virtual} = {stages}; type for example parallel.pipeline_layout='{example}'"
        )
    parts[0], parts[-1] = parts[0].removeprefix("E"), parts[-1].removesuffix("L")
    if "".join(parts) != pattern:
        raise LayoutError(
            f"parallel.pipeline_layout={text!r} spells the layers {''.join(parts)!r}, the model's are {pattern!r} "
            f"(E first and L last stand for embedding and head); type for example parallel.pipeline_layout='{example}'"
        )
    return [len(part) for part in parts]


def check_corpus(config: Config) -> None:
    """Refuse a corpus or dataset that is missing or empty. Raises DataError. Looks at names and sizes only."""
    data = config.data
    if data.tokenizer is not None and not Path(data.tokenizer).expanduser().is_file():
        raise DataError(f"data.tokenizer={data.tokenizer} is not a file; give a Hugging Face tokenizer.json, or null")
    if data.prefix is not None:
        prefix = Path(data.prefix).expanduser()
        if not ((prefix / "manifest.json").is_file() or Path(f"{prefix}.bin").is_file()):
            raise DataError(
                f"data.prefix={data.prefix} is no prepared dataset; make one with `k3train data prepare input=... "
                f"output={data.prefix}`"
            )
        return
    named = [part.strip() for part in data.corpus.split(",")]
    if "default" in named or data.corpus.startswith("recall:"):
        return
    files = _corpus_files(named)
    if not files:
        raise DataError(f"data.corpus={data.corpus} matches no file; give text files, a glob, a folder, or default")
    if not any(f.stat().st_size for f in files):
        raise DataError(f"data.corpus={data.corpus} matches {len(files)} files, all empty")


def _corpus_files(named: list[str]) -> list[Path]:
    found: list[Path] = []
    for word in named:
        path = Path(word).expanduser()
        if path.is_dir():
            found += [p for p in path.rglob("*") if p.is_file()]
        elif path.is_file():
            found.append(path)
        else:
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
            found += [p for p in anchor.glob(pattern) if p.is_file()]
    return found


_POSITIVE = [
    "cluster.gpu_memory_gb",
    "model.vocab_size", "model.hidden_size", "model.dense_hidden", "model.residual_block", "model.kda.heads",
    "model.kda.head_dim", "model.kda.conv_size", "model.mla.heads", "model.mla.q_lora_rank", "model.mla.kv_lora_rank",
    "model.mla.nope_dim", "model.mla.v_dim", "model.moe.experts", "model.moe.top_k", "model.moe.expert_hidden",
    "model.moe.latent", "model.moe.balancing.bins", "parallel.tensor", "parallel.pipeline", "parallel.virtual",
    "parallel.context", "parallel.expert", "parallel.expert_tensor", "parallel.world", "parallel.data", "optim.lr",
    "optim.eps", "optim.clip_grad", "optim.qk_clip", "optim.muon.ns_steps", "train.steps", "train.seq_length",
    "train.micro_batch", "train.global_batch", "train.log_every", "train.eval_every", "train.watchdog_seconds",
    "train.max_bad_steps", "train.stop_after", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every",
    "tracking.decay_every", "cluster.nodes", "cluster.ranks_per_node", "cluster.cpus_per_task", "cluster.chain",
    "quantize.calibration_tokens", "quantize.workers", "export.shard_bytes", "generate.max_tokens",
    "generate.prefill_chunk", "evaluate.samples",
]  # fmt: skip
_FRACTIONS = [
    "data.validation_fraction", "schedule.warmup_fraction", "schedule.min_lr_ratio", "schedule.decay_fraction",
    "optim.beta1", "optim.beta2", "optim.muon.momentum", "model.moe.balancing.ema", "generate.top_p",
]  # fmt: skip
_NOT_NEGATIVE = [
    "run.seed", "model.dense_layers", "model.mla.shared_dim", "model.moe.shared_experts", "model.init_std",
    "model.mtp_loss_weight", "optim.weight_decay", "train.eval_samples", "train.sample_tokens", "train.threads",
    "data.workers", "cluster.gpus_per_node", "cluster.max_restarts", "cluster.signal_lead", "generate.temperature",
    "generate.top_k",
]  # fmt: skip


def _check_ranges(config: Config) -> None:
    for key in _POSITIVE:
        value = get(config, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}={value} must be above 0")
    for key in _FRACTIONS:
        value = get(config, key)
        if not 0 <= value <= 1:
            raise ConfigError(f"{key}={value} must lie in [0, 1]")
    for key in _NOT_NEGATIVE:
        value = get(config, key)
        if value is not None and value < 0:
            raise ConfigError(f"{key}={value} must not be negative")
    if not config.run.name or "/" in config.run.name or config.run.name.startswith("."):
        raise ConfigError(f"run.name={config.run.name!r} names a folder inside run.dir: no slash, no leading dot")


def get(config: Any, dotted: str) -> Any:
    """The value at a dotted key of nested dataclasses."""
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def _check_model(config: Config) -> None:
    m, moe = config.model, config.model.moe
    pattern = layers(config)
    bound = m.kda.decay_bound
    if bound is not None and not BOUND_FLOOR <= bound < 0:
        raise ConfigError(
            f"model.kda.decay_bound={bound} is outside [{BOUND_FLOOR}, 0); type model.kda.decay_bound=-5, or null "
            "for the unbounded gate"
        )
    if m.kda.output_gate == "low_rank" and m.mixer == "softmax" and m.kda.head_dim < 1:
        raise ConfigError("model.kda.head_dim must be above 0")
    if moe.top_k >= moe.experts:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} must be below model.moe.experts={moe.experts}; type "
            f"model.moe.top_k={max(1, moe.experts // 4)}"
        )
    if m.dense_layers > len(pattern):
        raise ConfigError(f"model.dense_layers={m.dense_layers} exceeds the {len(pattern)} layers of model.pattern")
    if m.mtp_layers not in (0, 1):
        raise ConfigError(f"model.mtp_layers={m.mtp_layers} must be 0 or 1")
    if moe.latent_norm and moe.latent is None:
        raise ConfigError("model.moe.latent_norm=true needs model.moe.latent; type model.moe.latent_norm=false")
    for key, width in (
        ("model.moe.expert_hidden", moe.expert_hidden),
        ("model.moe.latent", moe.latent or m.hidden_size),
    ):
        if width % GROUP:
            key = key if moe.latent is not None or key.endswith("hidden") else "model.hidden_size"
            raise ConfigError(
                f"{key}={width} must be a multiple of {GROUP}, the MXFP4 group of expert weights; type "
                f"{key}={math.ceil(width / GROUP) * GROUP}"
            )


def _check_training(config: Config) -> None:
    t, s, o = config.train, config.schedule, config.optim
    if s.kind == "wsd" and s.warmup_fraction + s.decay_fraction > 1:
        raise ConfigError(
            f"schedule.warmup_fraction={s.warmup_fraction} + schedule.decay_fraction={s.decay_fraction} exceed 1"
        )
    if t.global_batch % t.micro_batch:
        raise LayoutError(
            f"train.global_batch={t.global_batch} does not divide by train.micro_batch={t.micro_batch}; type "
            f"train.micro_batch={math.gcd(t.global_batch, t.micro_batch)}"
        )
    if t.profile is not None:
        start, _, stop = t.profile.partition(":")
        if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
            raise ConfigError(f"train.profile={t.profile!r} must be START:STOP steps; type train.profile='10:12'")
    if s.batch_ramp is not None:
        parts = s.batch_ramp.split(":")
        if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise ConfigError(
                f"schedule.batch_ramp={s.batch_ramp!r} must be START:INCREMENT:STEPS; type "
                f"schedule.batch_ramp='{max(1, t.global_batch // 4)}:{max(1, t.global_batch // 4)}:100'"
            )
    if o.qk_clip is not None and config.engine.name != "megatron":
        raise ConfigError(
            f"optim.qk_clip={o.qk_clip} needs engine=megatron, not {config.engine.name}; type optim.qk_clip=null"
        )


def _check_graphs(config: Config) -> None:
    """What is captured holds nothing that the host must read, and nothing that lives on the host between steps."""
    if config.train.cuda_graphs == "none":
        return
    p = config.parallel
    hindrances = {
        f"engine={config.engine.name}": (config.engine.name != "megatron", "it captures megatron's schedule"),
        f"parallel.expert={p.expert} and parallel.expert_exchange={p.expert_exchange}": (
            p.expert > 1 and p.expert_exchange != "slots", "the exchange of experts reads its sizes on the host; "
            "parallel.expert_exchange=slots does not"
        ),
        f"parallel.context={p.context} and model.mixer={config.model.mixer}": (
            p.context > 1 and config.model.mixer != "kda", "only KDA's slices are looked up on the device"
        ),
        "model.mixer=linear": (config.model.mixer == "linear", "its chunks are cut by documents on the host"),
        "parallel.overlap_param_gather=true": (p.overlap_param_gather, "gathers are noted down on the host"),
        "train.activations.layer_inputs=offload": (
            config.train.activations.layer_inputs == "offload", "host memory is handed out again between steps"
        ),
    }  # fmt: skip
    for what, (there, why) in hindrances.items():
        if there:
            raise ConfigError(
                f"train.cuda_graphs=step cannot capture a step with {what} ({why}); type train.cuda_graphs=none"
            )


def _check_precision(config: Config) -> None:
    t, p = config.train, config.parallel
    precision = precision_of(t.precision, t.bf16_parts, cache_weights=t.fp8_cache_weights)
    if precision.recipe is None:
        return
    if precision.cache_weights and p.overlap_param_gather:
        raise ConfigError(
            "train.fp8_cache_weights=true quantises all weights before the first micro-batch, and "
            "parallel.overlap_param_gather=true lets them arrive during it; type parallel.overlap_param_gather=false"
        )
    if config.model.backend not in ("auto", "te"):
        raise ConfigError(
            f"train.precision={t.precision} is a recipe of transformer-engine and model.backend={config.model.backend} "
            "has none; type model.backend=te, or train.precision=bf16"
        )
    if config.engine.name != "megatron":
        raise ConfigError(
            f"train.precision={t.precision} is built for engine=megatron, not {config.engine.name}; type "
            "train.precision=bf16"
        )
    if t.cuda_graphs != "none" and "experts" not in t.bf16_parts and layers(config)[config.model.dense_layers :]:
        raise ConfigError(
            f"train.cuda_graphs={t.cuda_graphs}: the FP8 products of experts read their sizes on the host, which no graph "
            f"can capture; type train.bf16_parts='[{','.join(('experts', *t.bf16_parts))}]', or train.cuda_graphs=none"
        )
    rows = t.micro_batch * t.seq_length // (p.context * (p.tensor if sequence_parallel(config) else 1))
    if rows % MULTIPLE:
        raise ConfigError(
            f"train.precision={t.precision}: an FP8 product takes rows in multiples of {MULTIPLE}, and a micro-batch "
            f"has train.micro_batch*train.seq_length / (context, tensor) = {rows} a rank; type train.seq_length="
            f"{math.ceil(t.seq_length / (MULTIPLE * p.context * p.tensor)) * MULTIPLE * p.context * p.tensor}"
        )


def _check_layout(config: Config) -> None:
    m, p, t = config.model, config.parallel, config.train
    pattern = layers(config)
    divided = [
        ("model.kda.heads", m.kda.heads, "tensor", p.tensor),
        ("model.mla.heads", m.mla.heads, "tensor", p.tensor),
        ("model.vocab_size", m.vocab_size, "tensor", p.tensor),
        ("model.dense_hidden", m.dense_hidden, "tensor", p.tensor),
        ("model.moe.expert_hidden * shared_experts", m.moe.expert_hidden * m.moe.shared_experts, "tensor", p.tensor),
        ("model.moe.experts", m.moe.experts, "expert", p.expert),
        ("train.seq_length", t.seq_length, "context", p.context),
    ]
    for key, size, name, parts in divided:
        if size % parts:
            fitting = [d for d in _divisors(size) if d <= parts][-1]
            raise LayoutError(
                f"{key}={size} does not divide by parallel.{name}={parts}; type parallel.{name}={fitting}"
            )
    if p.expert_tensor != 1:
        raise LayoutError(
            f"parallel.expert_tensor={p.expert_tensor}: expert weights are never split by tensor parallelism here; "
            "type parallel.expert_tensor=1 and use parallel.expert"
        )
    _check_exchange(config)
    if p.sequence and p.tensor == 1:
        raise LayoutError("parallel.sequence=true needs parallel.tensor above 1; type parallel.sequence=null")
    if p.tensor > 1 and not sequence_parallel(config) and (m.mtp_layers or m.dense_layers < len(pattern)):
        raise LayoutError(
            f"parallel.sequence=false with parallel.tensor={p.tensor}: experts need sequence parallelism with tensor "
            "parallelism; type parallel.sequence=true"
        )
    if p.overlap_param_gather and (config.optim.name == "muon" or not p.distributed_optimizer):
        why = "optim.name=muon keeps whole matrices" if config.optim.name == "muon" else "distributed_optimizer is off"
        raise LayoutError(
            f"parallel.overlap_param_gather=true has nothing to gather ({why}); type parallel.overlap_param_gather=false"
        )
    heads = m.kda.heads // p.tensor
    if p.context > 1 and m.mixer != "kda" and heads % p.context:
        raise LayoutError(
            f"model.mixer={m.mixer} gives each of parallel.context={p.context} ranks some heads of the whole sequence, and "
            f"{heads} heads (model.kda.heads={m.kda.heads} over parallel.tensor={p.tensor}) do not divide by it; type "
            f"parallel.context={math.gcd(heads, p.context)}, or model.mixer=kda, whose ranks hold tokens"
        )
    stream = t.micro_batch * t.seq_length
    pieces = p.context * (p.tensor if sequence_parallel(config) else 1) * (2 if p.context > 1 else 1)
    if stream % pieces:
        raise LayoutError(
            f"a micro-batch has train.micro_batch*train.seq_length = {t.micro_batch}*{t.seq_length} = {stream} tokens, "
            f"which do not divide by {pieces} (context {p.context}"
            + (f", sequence parallel over {p.tensor}" if sequence_parallel(config) else "")
            + (", two halves of queries" if p.context > 1 else "")
            + f"); type train.seq_length={math.ceil(t.seq_length / pieces) * pieces}"
        )
    _check_pipeline(config, pattern)


def _check_exchange(config: Config) -> None:
    m, p, t = config.model, config.parallel, config.train
    kind = f"parallel.expert_exchange={p.expert_exchange}"
    if p.expert_capacity < 1:
        raise LayoutError(
            f"parallel.expert_capacity={p.expert_capacity} is less than an equal share of the tokens and would never hold "
            "them; type parallel.expert_capacity=1.25"
        )
    if p.overlap_experts and p.expert_exchange == "megatron":
        raise LayoutError(
            f"parallel.overlap_experts=true: {kind} waits for tokens as soon as they leave; type "
            "parallel.expert_exchange=sized (or slots), or parallel.overlap_experts=false"
        )
    if p.expert == 1 and p.overlap_experts:
        raise LayoutError(
            "parallel.overlap_experts=true has nothing to exchange with parallel.expert=1; type parallel.expert=2 (or "
            "more), or parallel.overlap_experts=false"
        )
    if p.overlap_experts and not m.moe.shared_experts:
        raise LayoutError(
            "parallel.overlap_experts=true computes shared experts while tokens travel, and model.moe.shared_experts=0; "
            "type parallel.overlap_experts=false"
        )
    if p.expert_exchange == "slots" and "experts" not in t.bf16_parts and t.precision not in ("auto", "fp32", "bf16"):
        raise LayoutError(
            f"{kind}: the FP8 products of experts read their sizes on the host and take no empty rows; type "
            f"train.bf16_parts='[{','.join(('experts', *t.bf16_parts))}]', or parallel.expert_exchange=sized"
        )


def _check_pipeline(config: Config, pattern: str) -> None:
    p = config.parallel
    if p.virtual > 1 and p.pipeline == 1:
        raise LayoutError(
            f"parallel.virtual={p.virtual} needs parallel.pipeline above 1; type parallel.virtual=1 "
            "or parallel.pipeline=2"
        )
    if p.pipeline > 1 and config.model.mtp_layers and config.model.attention_residuals == "off":
        raise LayoutError(
            f"model.mtp_layers=1 with parallel.pipeline={p.pipeline} needs the embedding on the last stage, which travels "
            "there as a source of attention residuals only; type model.attention_residuals=block, parallel.pipeline=1 "
            "or model.mtp_layers=0"
        )
    stages = p.pipeline * p.virtual
    if stages > len(pattern):
        raise LayoutError(
            f"parallel.pipeline*parallel.virtual = {p.pipeline}*{p.virtual} = {stages} stages, but the model has "
            f"{len(pattern)} layers; type parallel.virtual={max(1, len(pattern) // p.pipeline)}"
            + ("" if p.pipeline <= len(pattern) else f" parallel.pipeline={len(pattern)}")
        )
    counts = stage_layers(config)
    if counts is not None and p.pipeline == 1 and len(counts) > 1:
        raise LayoutError(
            "parallel.pipeline_layout needs parallel.pipeline above 1; type parallel.pipeline_layout=null"
        )
    if p.overlap_param_gather and not (p.distributed_optimizer and p.overlap_grad_reduce):
        raise LayoutError(
            "parallel.overlap_param_gather=true needs parallel.distributed_optimizer=true and "
            "parallel.overlap_grad_reduce=true; type all three, or parallel.overlap_param_gather=false"
        )


def _check_batch(config: Config, world: int) -> None:
    t, p = config.train, config.parallel
    data = world // (p.tensor * p.pipeline * p.context)
    unit = t.micro_batch * data
    if t.global_batch % unit:
        raise LayoutError(
            f"train.global_batch={t.global_batch} does not divide by train.micro_batch*data = {t.micro_batch}*{data} = "
            f"{unit}; type train.global_batch={math.ceil(t.global_batch / unit) * unit}"
            + (f" or train.micro_batch={t.global_batch // data}" if t.global_batch % data == 0 else "")
        )
    count = t.global_batch // unit
    if p.virtual > 1 and count % p.pipeline:
        raise LayoutError(
            f"parallel.virtual={p.virtual}: the {count} micro-batches of a step must divide by parallel.pipeline="
            f"{p.pipeline}; type train.global_batch={math.ceil(count / p.pipeline) * p.pipeline * unit}"
        )
    if config.schedule.batch_ramp is not None:
        start, increment, _ = (int(x) for x in config.schedule.batch_ramp.split(":"))
        for name, value in (("start", start), ("increment", increment)):
            if value % unit:
                raise LayoutError(
                    f"schedule.batch_ramp={config.schedule.batch_ramp!r}: its {name} {value} does not divide by "
                    f"train.micro_batch*data = {unit}; type a multiple of {unit}"
                )
            if p.virtual > 1 and value // unit % p.pipeline:
                raise LayoutError(
                    f"schedule.batch_ramp={config.schedule.batch_ramp!r}: the {value // unit} micro-batches of its {name} "
                    f"must divide by parallel.pipeline={p.pipeline} with parallel.virtual={p.virtual}; type a multiple of "
                    f"{p.pipeline * unit}"
                )
        if start > t.global_batch:
            raise LayoutError(f"schedule.batch_ramp starts at {start}, above train.global_batch={t.global_batch}")


def _check_engine(config: Config, world: int) -> None:
    e, p = config.engine, config.parallel
    if e.name == "megatron":
        if e.offload != "none":
            raise ConfigError(
                f"engine.offload={e.offload} belongs to DeepSpeed; type engine=deepspeed or engine.offload=none"
            )
        return
    if config.model.mtp_layers:
        raise ConfigError(
            "model.mtp_layers=1 is trained by engine=megatron only; type engine=megatron or model.mtp_layers=0"
        )
    if e.zero_stage not in (1, 2, 3):
        raise ConfigError(f"engine.zero_stage={e.zero_stage} must be 1, 2 or 3")
    split = {n: getattr(p, n) for n in ("tensor", "pipeline", "context", "expert") if getattr(p, n) != 1}
    if split:
        shown = " ".join(f"parallel.{k}={v}" for k, v in split.items())
        raise LayoutError(
            f"engine=deepspeed is data-parallel only, and {shown} was asked; type engine=megatron, or "
            + " ".join(f"parallel.{k}=1" for k in split)
        )
    if p.distributed_optimizer:
        raise LayoutError(
            "parallel.distributed_optimizer=true is the megatron engine's; type engine=deepspeed (which turns it off "
            "and shards by ZeRO), or engine=megatron"
        )
    if e.offload == "cpu" and config.optim.name == "muon":
        raise ConfigError(
            "optim.name=muon with engine.offload=cpu would orthogonalise matrices on the CPU; type optim.name=adamw, "
            "engine.offload=none, or engine=megatron"
        )
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(p, key):
            raise LayoutError(
                f"parallel.{key}=true is the megatron engine's; ZeRO overlaps by itself from stage 2 on: type "
                f"parallel.{key}=false, or engine=megatron"
            )


def _divisors(n: int) -> list[int]:
    return sorted({x for i in range(1, math.isqrt(n) + 1) if n % i == 0 for x in (i, n // i)})


def _smallest_data(config: Config) -> int:
    """The smallest data-parallel size whose stage holds whole expert groups."""
    p = config.parallel
    return p.expert // math.gcd(p.expert, p.tensor * p.context)


def _example_layout(pattern: str, stages: int) -> str:
    cuts = [round(i * len(pattern) / stages) for i in range(stages + 1)]
    return "E " + "|".join(" ".join(pattern[a:b]) for a, b in zip(cuts, cuts[1:])) + " L"


def all_fields(instance: Any, prefix: str = "") -> list[str]:
    """Dotted names of every leaf of nested dataclasses."""
    names: list[str] = []
    for f in fields(instance):
        value = getattr(instance, f.name)
        names += all_fields(value, f"{prefix}{f.name}.") if is_dataclass(value) else [prefix + f.name]
    return names
