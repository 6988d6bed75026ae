"""`k3train evaluate`: held-out loss, bits per byte and recall suites of a run or an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.config.schema import Config
from k3train.errors import ConfigError


def evaluate(config: Config) -> int:
    """Print one table (and write evaluation.json into the run folder) for the suites of `evaluate.suites`."""
    from k3train.platform import install

    install()  # before megatron is imported: a machine without a GPU needs its adapter
    from k3train.inference.loading import load_decoder, open_source, start_process
    from k3train.tracking.progress import final_table

    for suite in config.evaluate.suites:
        if suite != "heldout" and not suite.startswith("recall:"):
            raise ConfigError(f"evaluate.suites: {suite!r} is unknown; use heldout, or recall:TASK (recall:overwrite)")
    folder = Path(config.run.dir) / config.run.name
    device = start_process()
    opened = open_source(config.evaluate.source, folder, print)
    settings = opened.config or config  # data and lengths of the run itself
    model = load_decoder(opened, device, config.train.precision).model
    rows: list[tuple[str, str]] = [("weights", str(opened.origin))]
    results: dict[str, Any] = {}
    for suite in config.evaluate.suites:
        if suite == "heldout" and settings.data.corpus.startswith("recall:"):
            suite = settings.data.corpus  # what such a run trains on: episodes that training never draws
        if suite == "heldout":
            results[suite] = _heldout(model, settings, opened, config, device)
        else:
            results[suite] = _recall(model, settings, suite, config, device)
        rows += [(f"{suite}: {name}", str(value)) for name, value in results[suite].items()]
    if folder.is_dir():
        (folder / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
    final_table(rows)
    return 0


def _heldout(model: Any, settings: Config, opened: Any, config: Config, device: Any) -> dict[str, Any]:
    from k3data.dataset import TextDataset, open_corpus
    from k3data.loader import evaluation_batches
    from k3train.evaluate.heldout import estimate, sequence_losses

    data, length = settings.data, settings.train.seq_length
    tokenizer = str(opened.tokenizer) if opened.kind == "hf" and opened.tokenizer else data.tokenizer
    manifest = open_corpus(
        [part.strip() for part in data.corpus.split(",")], prefix=data.prefix, tokenizer=tokenizer,
        vocab_size=opened.model.vocab_size, validation_fraction=data.validation_fraction, text_field=data.text_field,
        workers=data.workers, cache=data.cache,
    )  # fmt: skip
    if not manifest.valid.tokens:
        raise ConfigError(f"{manifest.folder} holds nothing out; prepare it with data.validation_fraction above 0")
    dataset = TextDataset(manifest, "valid", length, cache=data.cache)
    batches = evaluation_batches(dataset, config.evaluate.samples, micro_batch_size=1, device=device)
    loss = estimate(*sequence_losses(model, batches, length))
    bits = [manifest.bits_per_byte(x) for x in (loss.mean, loss.low, loss.high)]
    return {
        "loss, nats a token": str(loss),
        "bits per byte": f"{bits[0]:.4f} [{bits[1]:.4f}, {bits[2]:.4f}]",
        "unigram model": f"{manifest.unigram_nats:.4f}" if manifest.unigram_nats is not None else "unknown",
        "sequences": loss.units,
    }


def _recall(model: Any, settings: Config, suite: str, config: Config, device: Any) -> dict[str, Any]:
    from k3data.loader import evaluation_batches
    from k3data.recall import HELD_OUT, RecallDataset, parse_task
    from k3train.evaluate.heldout import recall

    length = settings.train.seq_length
    task = parse_task(suite)
    dataset = RecallDataset(
        task, length, vocab_size=model.ctx.model.vocab_size, seed=settings.run.seed, stream=HELD_OUT
    )
    batches = evaluation_batches(dataset, config.evaluate.samples, micro_batch_size=1, device=device)
    share = recall(model, batches, length)
    return {"accuracy": str(share), "sequences": share.units}
