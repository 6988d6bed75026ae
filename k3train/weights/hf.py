"""Write a model as a Hugging Face folder, streaming: no process ever holds more than one tensor and one read buffer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from k3train.config import hf as hf_config
from k3train.config.hf import SpecialTokens
from k3train.config.schema import ModelConfig
from k3train.weights.folder import FolderWriter, WriteResult
from k3train.weights.names import entries
from k3train.weights.shards import TensorSpec
from k3train.weights.source import TensorSource, check_finite

Progress = Callable[[int, int, str], None]
"""Called with (shards done, shards in all, what was just finished)."""


def export_folder(
    model: ModelConfig,
    source: TensorSource,
    output: Path,
    *,
    identity: Mapping[str, Any],
    format: str = "auto",
    tokenizer: Path | None = None,
    tokens: SpecialTokens | None = None,
    shard_bytes: int = 5_000_000_000,
    max_positions: int = hf_config.MAX_POSITIONS,
    rank: int = 0,
    world: int = 1,
    progress: Progress | None = None,
) -> WriteResult:
    """Write `model` with the weights of `source` into `output`; call it alike in each of `world` processes.

    identity: what is exported (a checkpoint's path and step), so that an interrupted export is only continued with the
    same. tokenizer: a tokenizer.json to copy. tokens: its special ids; None reads them from the tokenizer.
    Raises WeightsError for weights that are missing, misshapen or not finite, for a folder that holds something else,
    and for a full disk; ConfigError for a model that the format cannot describe.
    """
    format = hf_config.format_of(model, format)
    if tokens is None:
        tokens = tokens_of(tokenizer) if tokenizer is not None else SpecialTokens()
    table = {entry.hf: entry for entry in entries(model, format)}
    config = hf_config.to_hf(model, format, tokens=tokens, max_positions=max_positions)
    writer = FolderWriter(
        output,
        [TensorSpec(entry.hf, entry.dtype, entry.hf_shape) for entry in table.values()],
        identity={**identity, "config": config},
        shard_bytes=shard_bytes,
        rank=rank,
        world=world,
    )

    def produce(spec: TensorSpec) -> Tensor:
        entry = table[spec.name]
        return check_finite(entry.to_hf(source.read(entry.ours, entry.expert)), spec.name, "the exported model")

    try:
        pending = writer.pending()
        done = len(writer.own) - len(pending)
        for shard in pending:
            writer.write(shard, produce)
            done += 1
            if progress is not None:
                progress(done, len(writer.own), shard.file)
        return writer.finish(side_files(config, tokens, tokenizer))
    finally:
        writer.close()


def side_files(config: Mapping[str, Any], tokens: SpecialTokens, tokenizer: Path | None) -> dict[str, bytes]:
    """The small files beside the weights: name -> content."""
    files = {"config.json": _json(config), "generation_config.json": _json(_generation(tokens))}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.read_bytes()
        files["tokenizer_config.json"] = _json(_tokenizer_config(tokenizer, tokens))
    return files


def tokens_of(tokenizer: Path) -> SpecialTokens:
    """End of document as start, stop and padding token: the only special token that our corpora know."""
    from k3data.tokenizer import Tokenizer

    end = Tokenizer.load(tokenizer).eod
    return SpecialTokens(bos=end, eos=end, pad=end)


def _generation(tokens: SpecialTokens) -> dict[str, Any]:
    ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad}
    return {key: value for key, value in ids.items() if value is not None} | {"do_sample": False}


def _tokenizer_config(tokenizer: Path, tokens: SpecialTokens) -> dict[str, Any]:
    """What AutoTokenizer needs beside tokenizer.json."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(tokenizer))
    named = {"bos_token": tokens.bos, "eos_token": tokens.eos, "pad_token": tokens.pad}
    found = {key: inner.id_to_token(number) for key, number in named.items() if number is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **found}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
