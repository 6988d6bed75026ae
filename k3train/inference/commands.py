"""`k3train generate`: continue prompts with a run, a checkpoint or an exported folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from k3train.config.schema import Config
from k3train.errors import ConfigError


def generate(config: Config) -> int:
    """Write the continuation of `generate.prompt` (or of each line of `prompts_file`) to stdout, as it comes."""
    from k3train.platform import install

    install()  # before megatron is imported: a machine without a GPU needs its adapter
    from k3train.inference.generate import Sampling
    from k3train.inference.generate import generate as run
    from k3train.inference.loading import load_decoder, open_source, start_process

    wanted = config.generate
    sampling = Sampling(wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed)
    prompts = _prompts(config)
    device = start_process()
    opened = open_source(wanted.source, Path(config.run.dir) / config.run.name, _aside)
    if opened.tokenizer is None:
        raise ConfigError(f"{opened.origin} has no tokenizer.json; put the one it was trained with beside it")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(opened.tokenizer))
    decoder = load_decoder(opened, device, config.train.precision)
    ids = [tokenizer.encode(p).ids for p in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    streaming = wanted.stream and len(prompts) == 1
    rows = run(decoder, ids, wanted.max_tokens, sampling, eos=opened.tokens.eos, prefill_chunk=wanted.prefill_chunk)
    if streaming:
        print(prompts[0], end="", flush=True)
        for piece in pieces(tokenizer.decode, (row[0] for row in rows if row[0] not in (None, opened.tokens.eos))):
            print(piece, end="", flush=True)
        print()
        return 0
    for row in rows:
        for b, token in enumerate(row):
            if token is not None and token != opened.tokens.eos:
                written[b].append(token)
    for prompt, tokens in zip(prompts, written):
        print(prompt + tokenizer.decode(tokens))
        print("-" * 40)
    return 0


def pieces(decode: Callable[[list[int]], str], tokens: Iterable[int]) -> Iterator[str]:
    """What each token adds to the text, as it comes: half a character waits for its other half."""
    taken: list[int] = []
    shown = ""
    for token in tokens:
        taken.append(token)
        text = decode(taken)
        whole = text[:-1] if text.endswith("\ufffd") else text
        yield whole[len(shown) :]
        shown = whole


def _aside(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _prompts(config: Config) -> list[str]:
    """One prompt, or the non-empty lines of a file. Raises ConfigError for a missing or empty file."""
    name = config.generate.prompts_file
    if name is None:
        return [config.generate.prompt]
    file = Path(name)
    if not file.is_file():
        raise ConfigError(f"generate.prompts_file={name} is not there; give a text file with one prompt a line")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    if not lines:
        raise ConfigError(f"generate.prompts_file={name} holds no prompt; write one a line")
    return lines
