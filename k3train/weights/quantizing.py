"""`k3train quantize`: plan, processes, calibration text, report."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from k3train.config.schema import Config
from k3train.durable import write_atomically
from k3train.errors import DataError, WeightsError
from k3train.weights.commands import place, run_folder
from k3train.weights.mxfp4 import ScaleRule
from k3train.weights.quantize import REPORT, Plan, QuantisedFolder, round_folder
from k3train.weights.reader import HFFolder

JUDGE_TOKENS = 16384  # of held-out text, for loss, KL and agreement before and after


def run_quantize(config: Config) -> int:
    """Quantise an exported folder in quantize.workers processes (times those of a launcher). Returns the exit code."""
    source, output = folders(config)
    if not (source / "config.json").is_file():
        raise WeightsError(
            f"{source} is no Hugging Face folder; write one with `k3train export run.name={config.run.name}`, "
            "or name one: quantize.source=FOLDER"
        )
    config = with_run_settings(config, source)
    rank, launched = place()
    workers = config.quantize.workers
    world = launched * workers
    begin = time.perf_counter()
    # Children inherit nothing: each opens the source and the output by itself, as a rank of a launcher does.
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=_child, args=(config, source, output, rank * workers + i, world), daemon=True)
        for i in range(1, workers)
    ]
    for child in children:
        child.start()

    def watch() -> None:
        failed = [i for i, child in enumerate(children, 1) if child.exitcode not in (None, 0)]
        if failed:
            raise WeightsError(f"worker {failed[0]} of {workers} ended early; its error is above. Run again to go on")

    try:
        folder = quantise_part(config, source, output, rank * workers, world, watch, print if rank == 0 else None)
    except BaseException:
        for child in children:
            child.terminate()
        raise
    for child in children:
        child.join()
    watch()
    if rank == 0:
        report = add_model_report(config, folder, folder.saved_report())
        seconds = time.perf_counter() - begin
        print(table(report), flush=True)
        print(f"{output}: {seconds:.1f} s; the whole report is {output / REPORT}", flush=True)
    return 0


def folders(config: Config) -> tuple[Path, Path]:
    """(source, output) of the configuration."""
    source = Path(config.quantize.source) if config.quantize.source else run_folder(config)
    if not (source / "config.json").is_file():  # a run: its export lies inside
        source = source / "hf"
    if config.quantize.output:
        return source, Path(config.quantize.output)
    suffix = config.quantize.format if config.quantize.format != "bf16" else "mxfp4-bf16"
    return source, source.with_name(f"{source.name}-{suffix}")


def with_run_settings(config: Config, source: Path) -> Config:
    """Corpus, sequence length and cache of the run whose export this is, if it is one."""
    saved = source.resolve().parent / "config.yaml"
    if not saved.is_file():
        return config
    from k3train.config.compose import load_resolved

    run = load_resolved(saved)
    return replace(config, data=run.data, train=replace(config.train, seq_length=run.train.seq_length))


def quantise_part(
    config: Config,
    source: Path,
    output: Path,
    rank: int,
    world: int,
    watch: Callable[[], None] = lambda: None,
    say: Callable[[str], None] | None = None,
) -> QuantisedFolder:
    """This process's share of the work, and (rank 0) the finished folder."""
    import torch

    weights = HFFolder(source)
    device = _device(rank)
    q = config.quantize
    calibrate = q.method == "gptq" and not weights.packed
    about = {"text": q.calibration or "validation", "tokens": q.calibration_tokens, "length": config.train.seq_length}
    method, scales = "gptq" if calibrate else "rtn", cast(ScaleRule, q.scales)
    plan = Plan(method, scales, q.format, config.export.shard_bytes, about if calibrate else None)
    folder = QuantisedFolder(weights, output, plan, rank=rank, world=world)
    folder.writer.watch = watch
    if say is not None:
        kept = ", experts are packed already: their bytes are kept" if weights.packed else ""
        say(f"quantize: {source} -> {output} ({plan.method}, scales {plan.scales}, {plan.format}, {device}{kept})")
    progress = _progress(say)
    try:
        if not calibrate or folder.writer.complete:
            round_folder(folder, device, progress)
        else:
            _install_platform()
            from k3train.weights.calibration import read_texts, shared_texts, token_batches
            from k3train.weights.quantize_gptq import Calibration, feed_back_folder

            if device.type == "cpu":
                # A matrix product depends on how many threads share it: bytes must not depend on the number of workers.
                torch.set_num_threads(config.train.threads or 1)
            texts = shared_texts(
                folder.writer.work / "calibration.safetensors",
                lambda: _texts(read_texts, config, source, weights, calibrate=True),
                rank=rank,
            )
            calibration = Calibration(*(token_batches(part, texts.end) for part in texts.parts()))
            feed_back_folder(folder, calibration, device, _dtype(device), progress)
        folder.finish()
    finally:
        folder.writer.close()
    if say is not None and folder.writer.reused:
        say(f"  {folder.writer.reused} shards kept from an earlier attempt")
    return folder


def add_model_report(config: Config, folder: QuantisedFolder, report: dict[str, Any]) -> dict[str, Any]:
    """Compare both folders on held-out text and add the numbers, or why there are none, to the report."""
    if report.get("model"):
        return report
    _install_platform()
    from k3train.weights.calibration import read_texts, token_batches
    from k3train.weights.compare import compare

    source, output = folder.source, folder.writer.folder
    calibrate = folder.plan.method == "gptq"
    try:
        texts = _texts(read_texts, config, source.folder, source, calibrate=calibrate)
    except DataError as error:
        report["model"] = {"not_run": str(error)}
    else:
        device = _device(0)
        batches = token_batches(texts.judge, texts.end)
        found = compare(source.model, source, HFFolder(output), batches, device, _dtype(device))
        report["outputs"] = [layer.as_dict() for layer in found.layers]
        report["model"] = found.model.as_dict() if found.model else None
    write_atomically(output / REPORT, json.dumps(report, indent=1).encode() + b"\n")
    return report


def table(report: dict[str, Any]) -> str:
    """The report as a table for a terminal: one line a layer, then the model."""
    outputs = {line["layer"]: line for line in report.get("outputs") or []}
    lines = ["layer   SQNR dB  norm ratio  zeros %  clipped %  scale bytes  output error  rerouted %"]
    for line in [*report["layers"], {"layer": "all", **report["all"]}]:
        out = outputs.get(line["layer"])
        shown = f"{out['relative']:12.4f}  {100 * out['rerouted']:9.2f}" if out else f"{'-':>12}  {'-':>9}"
        sqnr = "exact" if line["sqnr_db"] is None else f"{line['sqnr_db']:.2f}"
        scales = f"{line['scale_min']}..{line['scale_max']}"
        lines.append(
            f"{line['layer']!s:>5}  {sqnr:>8}  {line['norm_ratio']:10.4f}  {100 * line['zero_share']:7.2f}  "
            f"{100 * line['clipped_share']:9.2f}  {scales:>11}  {shown}"
        )
    gains = [
        m["output_sqnr_db"] - m["output_sqnr_rtn_db"] for m in report["matrices"].values() if m.get("output_sqnr_db")
    ]
    if gains:
        lines.append(
            "output SQNR against round-to-nearest, on tokens that decided nothing: "
            f"{sum(gains) / len(gains):+.2f} dB mean, {min(gains):+.2f} dB worst of {len(gains)} matrices"
        )
    model = report.get("model") or {}
    if "kl_mean" in model:
        lines.append(
            f"model, {model['tokens']:,} held-out tokens: loss {model['loss_reference']:.4f} -> "
            f"{model['loss_quantised']:.4f} nats ({model['loss_change']:+.4f}), KL mean {model['kl_mean']:.5f}, "
            f"p99 {model['kl_p99']:.5f}, top-1 agreement {100 * model['top1_agreement']:.2f} %"
        )
    elif "not_run" in model:
        lines.append(f"model: not run ({model['not_run']})")
    suspicious = [f"{name}: {m['suspicious']}" for name, m in report["matrices"].items() if m.get("suspicious")]
    lines += [f"SUSPICIOUS {text}" for text in suspicious[:5]]
    return "\n".join([*lines, report["note"]])


def _texts(read: Callable[..., Any], config: Config, source: Path, weights: HFFolder, *, calibrate: bool) -> Any:
    known = replace(config, model=weights.model)
    return read(
        known, source / "tokenizer.json", config.train.seq_length, calibrate=calibrate, judge_tokens=JUDGE_TOKENS
    )


def _child(config: Config, source: Path, output: Path, rank: int, world: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    quantise_part(config, source, output, rank, world)


def _install_platform() -> None:
    from k3train import platform

    platform.install()


def _device(rank: int) -> Any:
    import torch

    return torch.device(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _progress(say: Callable[[str], None] | None) -> Callable[[int, int, str], None]:
    begin = time.perf_counter()
    first: list[int] = []

    def tell(done: int, total: int, what: str) -> None:
        first.append(done - 1)
        made = done - first[0]
        left = (time.perf_counter() - begin) / made * (total - done)
        if say is not None and (done == total or made == 1 or done % max(1, total // 20) == 0):
            say(f"  {done}/{total} shards ({what}), about {left:.0f} s left")

    return tell
