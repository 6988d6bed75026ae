"""Every configuration key of k3train: its type, unit and default. Hydra composes onto these dataclasses.

`conf/` holds values only; a key that is not here does not exist. Lengths are tokens, batches are sequences,
times are seconds, learning rates are per optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class RunConfig:
    name: str = "${model.name}"  # names the run folder and the W&B run; the same name resumes
    dir: str = "runs"  # the run folder is dir/name
    seed: int = 1234


@dataclass
class KDAConfig:
    """Kimi Delta Attention (report section 2.1.1) and the shapes its ladder of simpler mixers shares."""

    heads: int = MISSING
    head_dim: int = MISSING  # key and value size of a head
    conv_size: int = 4  # taps of the short causal convolutions
    decay_bound: float | None = -5.0  # log-decay floor in [-5.9, 0); null is the unbounded softplus gate
    output_gate: str = "full"  # full | low_rank (Kimi Linear)


@dataclass
class MLAConfig:
    """Gated multi-head latent attention without positions (report section 2.1.2)."""

    heads: int = MISSING
    q_lora_rank: int | None = MISSING  # null: one full-rank query projection (Kimi Linear)
    kv_lora_rank: int = MISSING
    nope_dim: int = 128  # per-head query/key channels
    shared_dim: int = 64  # key slice shared by all heads (the unrotated "rope" slice)
    v_dim: int = 128
    output_gate: bool = True
    latent_eps: float = 1e-6  # epsilon of the two latent norms


@dataclass
class BalancingConfig:
    bins: int = 1000  # histogram bins of quantile balancing (report appendix D)
    ema: float = 0.0  # weight of the previous quantile estimate; 0 is the report's choice
    sign_step: float = 1e-3  # bias step of balancing=sign
    aux_coefficient: float = 1e-2  # loss weight of balancing=aux_loss


@dataclass
class MoEConfig:
    experts: int = MISSING
    top_k: int = MISSING
    shared_experts: int = 2  # fused into one MLP of shared_experts * expert_hidden
    expert_hidden: int = MISSING
    latent: int | None = MISSING  # width the routed experts work at; null: hidden_size, no latent projections
    latent_norm: bool = True  # RMSNorm between combine and the up projection
    renormalize: bool = True  # weights of the selected experts sum to one
    routed_scale: float = 1.0
    router_activation: str = "sigmoid"
    balancing: BalancingConfig = field(default_factory=BalancingConfig)


@dataclass
class ModelConfig:
    name: str = MISSING
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    pattern: str = MISSING  # K = linear mixer, F = full attention; "KKKF*23 F" repeats a word
    dense_hidden: int = MISSING  # width of the dense MLPs
    dense_layers: int = 1  # leading layers with a dense MLP in place of experts
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mixer: str = "kda"  # kda | gated_delta | delta | linear | softmax
    hybrid: str = "3:1"  # 3:1 keeps the pattern's F layers; none turns every layer into the mixer
    attention_residuals: str = "block"  # block | full | off
    residual_block: int = MISSING  # transformer layers in a block of attention residuals
    balancing: str = "quantile"  # quantile | sign | aux_loss | none
    activation: str = "situ"  # situ | swiglu
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0  # null: the up branch is not bounded
    norm_eps: float = 1e-5
    init_std: float = 0.02
    mtp_layers: int = 0  # multi-token prediction: 0, or 1 further layer while training
    mtp_loss_weight: float = 0.1  # of its loss, summed over tokens and divided by the main loss's tokens
    backend: str = "auto"  # auto | local | torch | te: where linears, norms, attention and grouped GEMMs come from
    loss_chunk: int = 0  # tokens whose logits exist at a time in training; 0: 4096, fewer where they would pass 1 GiB


@dataclass
class DataConfig:
    corpus: str = "default"  # default | text files, globs or folders | recall:TASK
    prefix: str | None = None  # an indexed dataset made by `k3train data prepare`; replaces corpus
    tokenizer: str | None = None  # a Hugging Face tokenizer.json; null trains one on the corpus
    cache: str | None = None  # null: $K3TRAIN_CACHE, else ~/.cache/k3train
    validation_fraction: float = 0.02
    text_field: str = "text"  # field of .jsonl records
    workers: int = 0  # processes that tokenize; 0: one a core
    input: str | None = None  # `data prepare`: what to read
    output: str | None = None  # `data prepare`: prefix to write; null: inside the cache


@dataclass
class ParallelConfig:
    tensor: int = 1
    sequence: bool | None = None  # sequence parallelism; null: on when tensor > 1
    pipeline: int = 1
    virtual: int = 1  # virtual pipeline stages a rank
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_exchange: str = "megatron"  # megatron | sized | slots: how tokens reach the experts of other ranks
    expert_capacity: float = 1.25  # slots: rows a rank has room for from each other one, over an equal share of them
    overlap_experts: bool = False  # shared experts are computed while tokens travel (sized and slots)
    world: int | None = None  # ranks in all; null: what the launcher gives, else the smallest that fits
    data: int | None = None  # data-parallel size; null: world / (tensor * pipeline * context)
    pipeline_layout: str | None = None  # "E K K K|F ...": stages split by |; even: by paired cost; null: by cost
    transport: str = "cached"  # cached | padded: what crosses a pipeline border with attention residuals
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    auto: bool = False  # propose the layout from world size and model


@dataclass
class MuonConfig:
    momentum: float = 0.95
    ns_steps: int = 5
    per_head: bool = True
    scale: str = "block"  # block | matrix: whose shape enters 0.2 * sqrt(max(A, B))
    router: bool = False  # true: the router's matrix goes to Muon too
    ns_dtype: str = "auto"  # auto | bf16 | fp32: precision of Newton-Schulz; auto is bf16 on GPU, fp32 on CPU


@dataclass
class OptimConfig:
    name: str = "adamw"  # adamw | muon
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only; vectors, convolutions and decay parameters have none
    clip_grad: float = 1.0
    muon: MuonConfig = field(default_factory=MuonConfig)
    qk_clip: float | None = None  # threshold of QK-Clip on MLA logits (100 in K2); null: off


@dataclass
class ScheduleConfig:
    kind: str = "cosine"  # cosine | wsd | linear
    warmup_fraction: float = 0.01
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2  # wsd: share of the run spent decaying
    batch_ramp: str | None = None  # "start:increment:steps" in sequences; null: constant


@dataclass
class ActivationsConfig:
    """What backward keeps of each class of tensor (k3train/config/activations.py); auto follows train.recompute."""

    units: str = "auto"  # auto | keep | recompute | fp8: products of gated units
    gates: str = "auto"  # auto | keep | recompute | fp8: gated outputs of KDA and MLA
    norms: str = "auto"  # auto | keep | recompute: outputs of norms
    layer_inputs: str = "auto"  # auto | keep | offload (to host memory): what recompute=full or unit keeps


@dataclass
class TrainConfig:
    steps: int = 200
    seq_length: int = 256
    micro_batch: int = 1  # sequences a rank sees in one forward
    global_batch: int = 8  # sequences in an optimizer step
    precision: str = "auto"  # auto | fp32 | bf16 | fp8_block | fp8_current | mxfp8; auto is bf16 on GPU, fp32 on CPU
    # FP8 recipes leave these parts in BF16 (k3train.config.precision.PARTS); all but the first two always
    bf16_parts: list[str] = field(
        default_factory=lambda: ["experts", "kda_gates", "router", "attention_residuals", "norms", "head"]
    )
    fp8_cache_weights: bool = False  # FP8: quantise weights once a step instead of once a micro-batch
    log_every: int = 1
    eval_every: int = 50
    eval_samples: int = 32  # held-out sequences
    recompute: str = "none"  # none | full | unit | selective
    recompute_layers: int | None = None  # of full and unit: only the layers before this one (from 0); null: all
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    sample_tokens: int = 48  # greedy sample written at the end; 0: none
    sample_prompt: str = "def "
    # none | step: a micro-batch, or the whole schedule of a pipeline, as one captured graph on a GPU
    cuda_graphs: str = "none"
    profile: str | None = None  # "start:stop": steps to trace into the run folder, start counted from 1, stop left out
    threads: int = 0  # torch CPU threads a process; 0: half of the cores, shared by the local processes
    watchdog_seconds: float = 600.0  # patience with a hung step after the first
    max_norm_growth: float | None = 20.0  # a gradient norm above this many running medians is a bad step; null: never
    max_bad_steps: int = 5  # NaN or exploding steps in a row before falling back to a checkpoint
    stop_after: int | None = None  # stop (with a checkpoint) after this step, as a time limit would


@dataclass
class CheckpointConfig:
    every: int = 100
    keep_last: int = 2
    keep_every: int | None = None
    async_save: bool = False
    resume: bool = True
    # another run's folder or checkpoint to start from (weights and optimizer); a run that has a whole checkpoint of its
    # own goes on from that one and says so, so that a job started again by the same command loses nothing
    load: str | None = None
    load_optimizer: bool = True


@dataclass
class TrackingConfig:
    wandb: str = "auto"  # auto | online | offline | disabled; auto is offline without a key
    project: str = "k3train"
    entity: str | None = None
    progress_seconds: float = 5.0
    decay_every: int = 10  # steps between decay and depth-attention statistics


@dataclass
class ClusterConfig:
    name: str = "local"
    nodes: int = 1
    gpus_per_node: int = 8  # 0: CPU ranks
    gpu_memory_gb: float = 141.0  # memory of one GPU (H200), for plans and parallel=auto
    ranks_per_node: int | None = None  # null: gpus_per_node
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "24:00:00"
    cpus_per_task: int = 8
    mem: str | None = None
    signal_lead: int | None = None  # seconds before the limit; null: from the measured save time
    max_restarts: int = 10  # restarts without progress before giving up
    requeue: bool = True  # false: a chain of singleton jobs
    chain: int = 4  # jobs of the chain when requeue is off
    launcher: str = "srun"  # srun | torchrun
    container: str | None = None  # image for pyxis or apptainer
    container_runtime: str = "none"  # none | pyxis | apptainer
    setup: list[str] = field(default_factory=list)  # shell lines before the launch
    extra: list[str] = field(default_factory=list)  # further #SBATCH lines


@dataclass
class EngineConfig:
    name: str = "megatron"  # megatron | deepspeed
    zero_stage: int = 1
    offload: str = "none"  # none | cpu: where ZeRO keeps and updates optimizer state
    persistent_numel: int = 100_000  # ZeRO-3: parameters of fewer elements stay whole on every rank


@dataclass
class QuantizeConfig:
    source: str | None = None  # an exported folder or a run; null: this run's export
    output: str | None = None
    method: str = "rtn"  # rtn | gptq
    scales: str = "even"  # even | mse
    format: str = "mxfp4"  # mxfp4 | bf16
    calibration: str | None = None  # text for gptq; null: the run's validation text
    calibration_tokens: int = 65536
    workers: int = 1


@dataclass
class ExportConfig:
    source: str | None = None  # run folder or checkpoint; null: this run
    output: str | None = None  # null: run folder/hf
    shard_bytes: int = 5_000_000_000
    format: str = "auto"  # auto | kimi_k3 | kimi_linear


@dataclass
class ImportConfig:
    source: str | None = None  # Hugging Face folder


@dataclass
class GenerateConfig:
    source: str | None = None  # run folder, checkpoint or exported folder; null: this run
    prompt: str = "def "
    prompts_file: str | None = None
    max_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    prefill_chunk: int = 512
    seed: int = 0
    stream: bool = True


@dataclass
class EvaluateConfig:
    source: str | None = None
    samples: int = 64
    suites: list[str] = field(default_factory=lambda: ["heldout"])


@dataclass
class Config:
    """The whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    imports: ImportConfig = field(default_factory=ImportConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "model.mixer": ("kda", "gated_delta", "delta", "linear", "softmax"),
    "model.hybrid": ("3:1", "none"),
    "model.attention_residuals": ("block", "full", "off"),
    "model.balancing": ("quantile", "sign", "aux_loss", "none"),
    "model.activation": ("situ", "swiglu"),
    "model.backend": ("auto", "local", "torch", "te"),
    "model.kda.output_gate": ("full", "low_rank"),
    "model.moe.router_activation": ("sigmoid",),
    "parallel.transport": ("cached", "padded"),
    "parallel.expert_exchange": ("megatron", "sized", "slots"),
    "optim.name": ("adamw", "muon"),
    "optim.muon.scale": ("block", "matrix"),
    "optim.muon.ns_dtype": ("auto", "bf16", "fp32"),
    "schedule.kind": ("cosine", "wsd", "linear"),
    "train.precision": ("auto", "fp32", "bf16", "fp8_block", "fp8_current", "mxfp8"),
    "train.cuda_graphs": ("none", "step"),
    "train.activations.units": ("auto", "keep", "recompute", "fp8"),
    "train.activations.gates": ("auto", "keep", "recompute", "fp8"),
    "train.activations.norms": ("auto", "keep", "recompute"),
    "train.activations.layer_inputs": ("auto", "keep", "offload"),
    "train.recompute": ("none", "full", "unit", "selective"),
    "tracking.wandb": ("auto", "online", "offline", "disabled"),
    "cluster.launcher": ("srun", "torchrun"),
    "cluster.container_runtime": ("none", "pyxis", "apptainer"),
    "engine.name": ("megatron", "deepspeed"),
    "engine.offload": ("none", "cpu"),
    "quantize.method": ("rtn", "gptq"),
    "quantize.scales": ("even", "mse"),
    "quantize.format": ("mxfp4", "bf16"),
    "export.format": ("auto", "kimi_k3", "kimi_linear"),
}
"""Keys that take one of a few words."""


def expand_pattern(pattern: str, hybrid: str = "3:1") -> str:
    """Expand `"KKKF*2 F"` to `"KKKFKKKFF"`; `hybrid="none"` turns every F into K.

    Raises ValueError naming the offending word.
    """
    layers = ""
    for word in pattern.split():
        letters, _, times = word.partition("*")
        if not letters or set(letters) - {"K", "F"} or (times and not times.isdigit()):
            raise ValueError(f"model.pattern: {word!r} is not letters K and F, optionally *N, as in 'KKKF*2 F'")
        layers += letters * int(times or 1)
    if not layers:
        raise ValueError("model.pattern is empty; give for example 'KKKF*2 F'")
    return layers.replace("F", "K") if hybrid == "none" else layers
