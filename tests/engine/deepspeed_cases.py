"""What the ranks of the pool run with the DeepSpeed engine, beside the megatron engine on the same ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.engine import deepspeed_saving, deepspeed_state
from k3train.engine.deepspeed import DeepSpeedEngine, require
from k3train.engine.deepspeed_convert import live_states
from k3train.engine.megatron import MegatronEngine
from k3train.errors import CheckpointError
from k3train.parallel import layout as layouts
from tests.parallel.tiny import SEED, batches, make_engine, tiny_config

os.environ["TORCHDYNAMO_DISABLE"] = "1"
SHORT = {"model.pattern": "KKFK", "model.residual_block": 2, "train.global_batch": 4, "train.micro_batch": 1}
"""Four layers with every mechanism, and two or four micro-batches a step."""


def _forget_groups() -> None:
    """DeepSpeed keeps the groups of a process for good; a rank of the pool has new ones in every case."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if groups._WORLD_GROUP in dist.distributed_c10d._world.pg_map:
        return
    comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith(("_GROUP", "_GROUP_RANKS")):
            setattr(groups, name, {} if isinstance(value, dict) else None)


def zero_engine(
    stage: int, overrides: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> DeepSpeedEngine:
    """The tiny model under ZeRO; in stage 3 only vectors stay whole. weights: whole tensors to start from."""
    settings = {**SHORT, "parallel.distributed_optimizer": False, **(overrides or {})}
    config = tiny_config(settings, SEED if weights is not None else SEED + 1)
    config.engine.name, config.engine.zero_stage, config.engine.persistent_numel = "deepspeed", stage, 0
    layout = layouts.initialize(layouts.Sizes(world=dist.get_world_size()), timeout_minutes=1)
    require()
    _forget_groups()
    engine = DeepSpeedEngine(config, layout, torch.device("cpu"))
    if weights is not None:
        fill(engine, weights)
    return engine


@torch.no_grad()
def fill(engine: DeepSpeedEngine, weights: dict[str, torch.Tensor]) -> None:
    for piece in deepspeed_state.pieces(engine):
        piece.fp32().copy_(piece.slice_of(weights[piece.name]))
    deepspeed_state.refresh_model(engine)
    for name, buffer in engine.model.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


def megatron_engine(overrides: dict[str, Any] | None = None) -> tuple[MegatronEngine, dict[str, torch.Tensor]]:
    """The megatron engine with data parallelism, and what it starts from, buffers included."""
    overrides = {**SHORT, **(overrides or {})}
    engine = make_engine({}, overrides)
    model = engine.models[0]
    return engine, {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def run(engine: Any, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps."""
    seen = []
    for step in steps:
        source = batches(engine.config, engine.layout, step, SEED)
        result = engine.step(source, engine.config.optim.lr, engine.micro_batches(engine.config.train.global_batch))
        assert not result.skipped
        seen.append((result.loss, result.grad_norm))
    return seen


def distances(got: list[tuple[float, float]], want: list[tuple[float, float]]) -> list[float]:
    """The larger relative distance of loss and gradient norm, by step."""
    return [max(abs(a - b) / b for a, b in zip(one, other)) for one, other in zip(got, want, strict=True)]


def moments(engine: DeepSpeedEngine | MegatronEngine) -> dict[str, torch.Tensor]:
    """Adam's first moments, whole: after one step they are the gradients, times what is equal for all."""
    if isinstance(engine, DeepSpeedEngine):
        return deepspeed_state.gather(engine, "exp_avg")
    shapes = {n: p.shape for n, p in engine.models[0].named_parameters()}
    return {n: live["exp_avg"].reshape(shapes[n]).clone() for n, live in live_states(engine)}


def compare(stages: list[int], steps: int, overrides: dict[str, Any] | None = None) -> dict[int, list[float]]:
    """Stage -> distance of every step from the megatron engine's data parallelism."""
    engine, weights = megatron_engine(overrides)
    want = run(engine, range(steps))
    del engine
    return {stage: distances(run(zero_engine(stage, overrides, weights), range(steps)), want) for stage in stages}


def gradient_distances(
    stages: list[int], overrides: dict[str, Any] | None = None
) -> dict[int, list[tuple[float, str]]]:
    """Stage -> (distance, name) of every parameter's gradient in the first step, largest first; one process."""
    engine, weights = megatron_engine(overrides)
    run(engine, range(1))
    want = moments(engine)
    floor = 1e-7 * math.sqrt(sum(float(m.double().square().sum()) for m in want.values()))
    found: dict[int, list[tuple[float, str]]] = {}
    for stage in stages:
        zero = zero_engine(stage, overrides, weights)
        run(zero, range(1))
        got = moments(zero)
        assert got.keys() == want.keys()
        found[stage] = sorted(
            ((float((got[n] - m).norm()) / max(float(m.norm()), floor), n) for n, m in want.items()), reverse=True
        )
    return found


def variants(stage: int, changes: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Two steps of the stage as it is, then with each of the changes."""
    _, weights = megatron_engine()
    return [run(zero_engine(stage, change, weights), range(2)) for change in [{}, *changes]]


def bad_gradients(stage: int) -> dict[str, Any]:
    """Steps that must change nothing, among steps that go on as if they had not been."""
    _, weights = megatron_engine()
    straight = run(zero_engine(stage, None, weights), range(3))
    engine = zero_engine(stage, None, weights)
    seen = run(engine, range(2))
    before = engine.full_parameters()
    micro = engine.micro_batches(engine.config.train.global_batch)

    def step(**options: Any) -> Any:
        return engine.step(batches(engine.config, engine.layout, 9, SEED), 1.0, micro, **options)

    explodes = step(max_grad_norm=0.1)
    last = dist.get_rank() == dist.get_world_size() - 1
    hook = engine.model.final_norm.register_forward_hook(lambda _module, _inputs, x: x * (math.nan if last else 1.0))
    nan = step()
    hook.remove()
    after = engine.full_parameters()
    same = all(torch.equal(before[n], p) for n, p in after.items())
    return {
        "skipped": [explodes.skipped, nan.skipped], "norm": explodes.grad_norm, "loss": nan.loss, "same": same,
        "went on": [*seen, *run(engine, range(2, 3))] == straight,
    }  # fmt: skip


def save_and_go_on(stage: int, folder: str, optim: str = "adamw") -> list[tuple[float, float]]:
    """Two steps, a save in the background during the third, then a fourth; what the last two looked like."""
    overrides = {"optim.name": optim, "optim.muon.ns_dtype": "fp32"}
    _, weights = megatron_engine(overrides)
    engine = zero_engine(stage, overrides, weights)
    run(engine, range(2))
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    sealed: list[Any] = []
    engine.save(Path(folder), {"step": 2}, seal=sealed.append, wait=False)
    seen = run(engine, range(2, 3))
    assert engine.poll_save(wait=True) == Path(folder)
    if dist.get_rank() == 0:
        names = {str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()}
        assert set(sealed[0]) == names, "the seal names every file"
    return [*seen, *run(engine, range(3, 4))]


def load_and_go_on(stage: int, folder: str, optim: str = "adamw") -> list[tuple[float, float]]:
    """Into an engine with other weights that has stepped before: steps three and four."""
    engine = zero_engine(stage, {"optim.name": optim, "optim.muon.ns_dtype": "fp32"})
    run(engine, range(7, 8))
    assert engine.load(Path(folder)) == {"step": 2}
    return run(engine, range(2, 4))


def failing_save(folder: str) -> str:
    """The last rank's disk is full: what every rank says, and that nothing was sealed."""
    engine = zero_engine(2)
    if dist.get_rank() == dist.get_world_size() - 1:

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        deepspeed_saving._save = full  # type: ignore[assignment]
    sealed: list[Any] = []
    try:
        engine.save(Path(folder), {}, seal=sealed.append)
    except CheckpointError as error:
        assert not sealed
        return str(error)
    return "saved"


def megatron_steps(load: str | None, save: str | None, steps: tuple[int, int]) -> list[tuple[float, float]]:
    """The megatron engine's data parallelism from a checkpoint, or from the start, to another."""
    engine, _ = megatron_engine()
    if load is not None:
        engine.load(Path(load))
    seen = run(engine, range(*steps))
    if save is not None:
        engine.save(Path(save), {"step": steps[1]})
    return seen


def zero_steps(stage: int, load: str, steps: tuple[int, int]) -> list[tuple[float, float]]:
    """The DeepSpeed engine from a checkpoint on."""
    engine = zero_engine(stage)
    engine.load(Path(load))
    return run(engine, range(*steps))


def by_deepspeeds_own_tools(stage: int, folder: str) -> dict[str, Any]:
    """The same moment saved by this engine, and by DeepSpeed and its converter: what differs, file by file."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    from k3train.engine import universal

    _, weights = megatron_engine()
    engine = zero_engine(stage, None, weights)
    run(engine, range(2))
    ours, native, theirs = (Path(folder) / name for name in ("ours", "native", "theirs"))
    if dist.get_rank() == 0:
        ours.mkdir()
    dist.barrier()
    engine.save(ours, {"step": 2})
    engine.engine.save_checkpoint(str(native), tag="two", save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in (native / "two").glob("*model_states.pt"):  # megatron's modules list a state that is None
            saved = torch.load(file, weights_only=False)
            saved["module"] = {k: v for k, v in saved["module"].items() if v is not None}
            torch.save(saved, file)
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(
            Namespace(input_folder=str(native / "two"), output_folder=str(theirs), inject_missing_state=True, **options)
        )
        (theirs / universal.ABOUT).write_text((ours / universal.ABOUT).read_text())
        for name in engine.names if stage == 3 else ():  # its converter leaves the counts in a file of its own
            step = (ours / universal.file_of(name, "step")).read_bytes()
            (theirs / universal.file_of(name, "step")).write_bytes(step)
        for name, buffer in engine.model.named_buffers():  # DeepSpeed keeps them elsewhere
            if getattr(buffer, "k3", None) is not None:
                (theirs / universal.FOLDER / name).mkdir(exist_ok=True)
                torch.save({"param": buffer.detach().clone()}, theirs / universal.file_of(name, "fp32"))
    dist.barrier()
    different = []
    for name, p in engine.names.items():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            left, right = universal.read(ours, name, key), universal.read(theirs, name, key)
            if not torch.equal(left, right.view(p.k3.shape)):  # type: ignore[attr-defined]
                different.append(f"{name}/{key}")
    after = run(engine, range(2, 4))
    loaded = zero_engine(stage)
    loaded.load(theirs)
    return {"different": different, "compared": 3 * len(engine.names), "goes on": run(loaded, range(2, 4)) == after}


def compare_on_the_kernels_path(stage: int) -> list[float]:
    """Distances of two steps where one call reads the vectors of several modules, as kernels on a GPU do."""
    from k3train.model import attention_residuals, k3

    real = attention_residuals.uses_kernels
    attention_residuals.uses_kernels = k3.uses_kernels = lambda source: True  # type: ignore[attr-defined]
    try:
        return compare([stage], 2)[stage]
    finally:
        attention_residuals.uses_kernels = k3.uses_kernels = real  # type: ignore[attr-defined]


def with_plain_deepspeed(stage: int, folder: str) -> dict[str, Any]:
    """A checkpoint of this engine loaded by DeepSpeed alone: `deepspeed.initialize` and its `load_checkpoint`."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from k3train.engine import universal
    from k3train.engine.deepspeed_optimizer import parameter_groups
    from k3train.model.build import build_chunks, chunks_of_rank, make_context

    reference = zero_engine(stage)
    reference.load(Path(folder))
    source = list(batches(reference.config, reference.layout, 2, SEED))
    want = reference.evaluate(iter(source), len(source))[0]
    config, layout = reference.config, reference.layout
    config.run.seed += 1
    ctx = make_context(config.model, layout, torch.float32, torch.device("cpu"))
    (model,) = build_chunks(ctx, chunks_of_rank(config.model, layout.sizes, 0, None), seed=config.run.seed)
    names = dict(model.named_parameters())
    for parameter in names.values():
        parameter.allreduce = True
    os.environ.setdefault("LOCAL_RANK", "0")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(parameter_groups(config, names), lr=0.5), dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 64},
            "checkpoint": {"load_universal": True},
        },
    )  # fmt: skip
    at = Path(folder)
    path, client = engine.load_checkpoint(str(at.parent), tag=at.name)
    assert path is not None and engine.global_steps == 2
    different = []
    for name, p in names.items():
        found = {"fp32": safe_get_full_fp32_param(p)}
        found |= {key: safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
        for key, tensor in found.items():
            if tensor is not None and not torch.equal(tensor, universal.read(at, name, key)):
                different.append(f"{name}/{key}")
    for name, buffer in model.named_buffers():
        if name in client["buffers"]:
            buffer.copy_(client["buffers"][name])
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in source:
            loss = engine(batch["tokens"], batch["labels"], reference._stream(batch))
            sums += torch.stack([(loss * batch["loss_mask"]).sum(), batch["loss_mask"].sum()])
    dist.all_reduce(sums)
    rates = {group["lr"] for group in engine.optimizer.optimizer.param_groups}
    return {"different": different, "loss": float(sums[0] / sums[1]), "want": want, "rates": rates}


def gradients_kept(stage: int) -> tuple[int, int]:
    """Under offload: gradient elements that the host holds, and elements of this rank's share of the parameters."""
    engine = zero_engine(stage, {"engine.offload": "cpu"})
    run(engine, range(1))
    zero = engine.optimizer
    places = [
        *zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values(),
        zero.grad_partitions_flat_buffer,
    ]
    held = [*places, *(flat.grad for flat in zero.fp32_partitioned_groups_flat)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in held}
    return sum(storages.values()), sum(flat.numel() for flat in zero.fp32_partitioned_groups_flat)


def compare_with_small_buckets(stages: list[int]) -> list[float]:
    """Distances of steps where stacked experts are longer than what is reduced together: in fp32 from the megatron
    engine, in bf16 from the same stage with large buckets."""
    from k3train.engine import deepspeed

    overrides = {"engine.offload": "cpu"} if stages == [3] else {}
    half = {**overrides, "train.precision": "bf16"}
    whole = [run(zero_engine(stage, half), range(2)) for stage in stages]
    real = deepspeed.BUCKET, deepspeed.LARGEST_BUCKET
    deepspeed.BUCKET = deepspeed.LARGEST_BUCKET = 3000
    try:
        cut = [run(zero_engine(stage, half), range(2)) for stage in stages]
        exact = compare(stages, 2, overrides)
    finally:
        deepspeed.BUCKET, deepspeed.LARGEST_BUCKET = real
    return [max(steps) for steps in exact.values()] + [max(distances(a, b)) / 1e3 for a, b in zip(cut, whole)]
