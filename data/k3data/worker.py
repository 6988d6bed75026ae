"""Tokenizing in processes that load no torch and no megatron.

A task is a run of sources; its result is one file of tokens in a scratch folder and the lengths of its documents. The
processes are started as `python -m k3data.worker` and take pickled tasks from their standard input, so that they never
import the parent's main module. The same function runs in this process when one worker is asked for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from k3data.corpus import Report, Source, fraction_of, read_documents
from k3data.tokenizer import Tokenizer
from k3train.errors import DataError, EnvironmentError_, K3TrainError

# Texts are encoded and written together up to this many characters, which bounds a worker's memory.
_BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class Task:
    """Tokenize `sources`, in order, into the file `output`."""

    sources: tuple[Source, ...]
    tokenizer: str  # path of a tokenizer.json
    eod_token: str
    text_field: str
    output: str
    dtype: str  # numpy name of the token type

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)


@dataclass
class Result:
    """One entry a document, in order: its length in tokens with the end, its UTF-8 bytes, its place in the split."""

    output: str
    size: int
    lengths: np.ndarray  # int64
    text_bytes: np.ndarray  # int64
    fractions: np.ndarray  # float64, of the document's name
    report: Report
    heavy_modules: tuple[str, ...] = ()  # torch or megatron, if the process has loaded them


_loaded: dict[tuple[str, str], Tokenizer] = {}


def run_task(task: Task) -> Result:
    """Do one task here. The tokens depend on the sources alone, not on how they were grouped into tasks."""
    key = (task.tokenizer, task.eod_token)
    if key not in _loaded:
        _loaded[key] = Tokenizer.load(task.tokenizer, task.eod_token)
    tokenizer = _loaded[key]
    report = Report()
    lengths: list[int] = []
    sizes: list[int] = []
    fractions: list[float] = []
    with open(task.output, "wb") as out:

        def write(texts: list[str]) -> None:
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                ids.append(tokenizer.eod)
                out.write(np.asarray(ids, dtype=task.dtype).tobytes())
                lengths.append(len(ids))
                sizes.append(len(text.encode("utf-8")))

        batch: list[str] = []
        pending = 0
        for source in task.sources:
            for document in read_documents(source, task.text_field, report):
                batch.append(document.text)
                fractions.append(fraction_of(document.name))
                pending += len(document.text)
                if pending >= _BATCH_CHARACTERS:
                    write(batch)
                    batch, pending = [], 0
        write(batch)
    heavy = tuple(name for name in ("torch", "megatron") if name in sys.modules)
    return Result(
        task.output, task.size, np.array(lengths, np.int64), np.array(sizes, np.int64),
        np.array(fractions, np.float64), report, heavy,
    )  # fmt: skip


def _send(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message; EOFError when the other side is gone."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0]))


def main() -> None:
    """Serve tasks from standard input until it closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed by a library goes to the log, not into the answers
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            task = _receive(sys.stdin.buffer)
            try:
                answer: Any = run_task(task)
            except Exception as error:
                answer = error if isinstance(error, K3TrainError) else DataError(f"tokenizing failed: {error!r}")
            _send(answers, answer)


class Pool:
    """`count` tokenizing processes; a context manager that leaves none behind."""

    def __init__(self, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RAYON_NUM_THREADS": "1",  # the parallelism is in the processes
            "TOKENIZERS_PARALLELISM": "false",
        }
        for _ in range(count):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "k3data.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env=environment,
                )
            )  # fmt: skip
        self._idle = list(self._processes)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            if exc[0] is not None:
                process.kill()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            process.stdout.close()

    def _run(self, task: Task) -> Result:
        with self._lock:
            process = self._idle.pop()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, task)
            answer = _receive(process.stdout)
        except (EOFError, BrokenPipeError, OSError) as error:
            names = ", ".join(source.name for source in task.sources[:3])
            raise EnvironmentError_(
                f"a tokenizing process ended with status {process.wait()} while it read {names}; "
                "if the machine ran out of memory, use fewer workers (data.workers=1)"
            ) from error
        with self._lock:
            self._idle.append(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def map(self, tasks: list[Task]) -> Iterator[Result]:
        """Results in the order of the tasks."""
        with ThreadPoolExecutor(len(self._processes)) as threads:
            yield from threads.map(self._run, tasks)


def run_all(tasks: list[Task], workers: int, done: Callable[[int], None]) -> list[Result]:
    """Run every task, over processes when `workers` > 1; `done` gets the bytes of each finished task.

    Raises what a task raised, and EnvironmentError_ when a process died.
    """
    results = []
    count = min(workers, len(tasks))
    with Pool(count) if count > 1 else contextlib.nullcontext() as pool:
        for result in pool.map(tasks) if pool is not None else map(run_task, tasks):
            results.append(result)
            done(result.size)
    return results


if __name__ == "__main__":
    # As the importable module, so that the classes in the answers are the ones that the parent knows.
    from k3data.worker import main as serve

    serve()
