"""A pool of gloo ranks for tests: one set of processes a world size, many cases inside it.

A case is a function named by "module:function" that every rank calls with the same keyword arguments; what each
returns comes back in rank order. The ranks are forked from a server that imported megatron once, so a set of ranks
costs a fraction of a second: after a case that failed or hung, its ranks are killed and a fresh set serves the next.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 150.0  # a case takes seconds; a loaded machine takes many times that
RECYCLE = 4  # cases a set of ranks serves: every engine leaves some sixty threads of its gloo groups behind
GRACE = 3.0  # after the first error the other ranks may still report their own before they are killed


class CaseFailed(AssertionError):
    """A case raised on a rank, or did not end in time. `first` is the rank that failed first, or -1 for a hang."""

    def __init__(self, message: str, first: int) -> None:
        super().__init__(message)
        self.first = first


class Pool:
    """`world` ranks that run cases one after the other."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix=f"ranks{world}-"))
        self.generation = 0
        self.served = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, case: str, *, timeout: float = TIMEOUT, **arguments: Any) -> list[Any]:
        """Call `module:function` with `arguments` on every rank; the results in rank order.

        Raises CaseFailed with the traceback of the rank that failed first on top, or with every rank's stack when
        the case is not over after `timeout` seconds.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((case, arguments, timeout)))
        results: dict[int, Any] = {}
        errors: list[tuple[int, str]] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world:
            waiting = {p: r for r, p in enumerate(self.pipes) if r not in results and r not in dict(errors)}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    good, value = False, "the process is gone"
                if good:
                    results[rank] = value
                else:
                    errors.append((rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(results) == self.world:
            self.served += 1
            if self.served % RECYCLE == 0:
                self.close()
            return [results[r] for r in range(self.world)]
        message = self._report(case, errors, results)
        self.close()
        raise CaseFailed(message, errors[0][0] if errors else -1)

    def _report(self, case: str, errors: list[tuple[int, str]], results: dict[int, Any]) -> str:
        lines = [f"rank {rank} of {self.world} failed in {case}:\n{text}" for rank, text in errors]
        stuck = [r for r in range(self.world) if r not in results and r not in dict(errors)]
        for rank in stuck:
            try:
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler writes the stack
            except ProcessLookupError:
                continue
        if stuck:
            time.sleep(0.3)
        for rank in stuck:
            stack = self._stack_file(rank).read_text() if self._stack_file(rank).is_file() else ""
            lines.append(f"rank {rank} of {self.world} was still in {case}:\n{stack}")
        return "\n".join(lines)

    def _stack_file(self, rank: int) -> Path:
        return self.folder / f"stack-{self.generation}-{rank}"

    def _start(self) -> None:
        # the fork server takes its search path from the environment
        paths = [str(ROOT), *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.preload"])
        self.generation += 1
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, rank, self.world, str(self.folder), self.generation, os.getpid()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        """End the ranks; the next case starts new ones."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def leave_with(session: int) -> None:
    """End this rank when the session that started it is gone, however it went."""
    while True:
        time.sleep(2.0)
        try:
            os.kill(session, 0)
        except ProcessLookupError:
            os._exit(1)


def serve(pipe: Connection, rank: int, world: int, folder: str, generation: int, session: int) -> None:
    """The life of one rank: a process group of its own for every case."""
    # The fork server is one for the process: another test's may have started it with other imports.
    importlib.import_module("tests.parallel.preload")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    threading.Thread(target=leave_with, args=(session,), daemon=True).start()
    stack = (Path(folder) / f"stack-{generation}-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    number = 0
    while True:
        try:
            case, arguments, timeout = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        number += 1
        try:
            store = f"file://{folder}/store-{generation}-{number}"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
            module, function = case.split(":")
            value = getattr(importlib.import_module(module), function)(**arguments)
            dist.barrier()
            dist.destroy_process_group()
            message = (True, value)
        except BaseException:
            message = (False, traceback.format_exc())
        sys.stdout.flush()
        try:  # plain pickle: tensors travel by value, without shared memory and the threads that serve it
            pipe.send_bytes(pickle.dumps(message))
        except OSError:  # the session gave this set of ranks up
            return
        if not message[0]:
            return


_pools: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """The session's pool of this size."""
    if world not in _pools:
        _pools[world] = Pool(world)
    return _pools[world]


@atexit.register
def _close_all() -> None:
    for one in _pools.values():
        one.close()
