"""Writing a checkpoint, in this thread or behind the training steps.

Both ways do the same: the tensors of this rank are gathered into a plan, written in torch's distributed format and
hashed, all over a gloo group of their own, so that a save in the background never meets the collectives of a step.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as dcp

from k3train.errors import CheckpointError

Checksums = dict[str, dict[str, Any]]
"""File name -> {"bytes": int, "sha256": hex}, of the files that all ranks wrote."""

BLOCK = 1 << 22


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, which is forced to the disk before."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        os.fsync(f.fileno())
        while block := f.read(BLOCK):
            digest.update(block)
        return {"bytes": f.tell(), "sha256": digest.hexdigest()}


class _Writer(dcp.FileSystemWriter):
    """torch's writer of files, which names what the system said: torch's zip format hides it behind its own alarm."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class Saver:
    """One save at a time. Every method is collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._error: BaseException | None = None
        self._checked = False

    @property
    def busy(self) -> bool:
        """Whether a background save has not been collected by `poll`."""
        return self._folder is not None

    def save(self, content: dict[str, Any], folder: Path, seal: Callable[[Checksums], None] | None) -> None:
        """Write `content` now. `seal` runs on rank 0 with the checksums of all files.

        Raises CheckpointError on every rank when any rank failed.
        """
        self._open_group()
        prepared = _prepare(content, check=not self._checked)
        self._checked = True
        self._write(prepared, folder, seal)

    def start(
        self, content: Callable[[], dict[str, Any]], folder: Path, seal: Callable[[Checksums], None] | None
    ) -> None:
        """Write in a thread what `content`, called there, gives: nothing that training goes on to change."""
        if self.busy:
            raise CheckpointError(f"{self._folder} is still being written; poll before the next save")
        self._open_group()
        self._folder, self._error = folder, None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None  # a thread starts on device 0
        self._thread = threading.Thread(target=self._run, args=(content, folder, seal, device), name="checkpoint")
        self._thread.start()

    def poll(self, *, wait: bool) -> Path | None:
        """The folder of the background save once every rank has written it; None while one has not.

        Raises CheckpointError on every rank when it failed on any.
        """
        if self._folder is None or self._thread is None:
            return None
        if wait:
            self._thread.join()
        busy = torch.tensor([self._thread.is_alive()], dtype=torch.int32)
        if dist.get_world_size() > 1:
            dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        if busy.item():
            return None
        self._thread.join()
        folder, self._folder, self._thread = self._folder, None, None
        if self._error is not None:
            raise _as_checkpoint_error(self._error, folder) from self._error
        return folder

    def _open_group(self) -> None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")

    def _run(
        self, content: Callable[[], dict[str, Any]], folder: Path, seal: Callable[[Checksums], None] | None,
        device: int | None,
    ) -> None:  # fmt: skip
        try:
            if device is not None:
                torch.cuda.set_device(device)
            self._write(_prepare(content(), check=False), folder, seal)
        except BaseException as error:
            self._error = error

    def _write(self, prepared: dict[str, Any], folder: Path, seal: Callable[[Checksums], None] | None) -> None:
        format_ = TorchDistSaveShardedStrategy()
        try:
            state, _, _ = _replace_state_dict_keys_with_sharded_keys(prepared, format_.keep_only_main_replica)
            planner = MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            )
            writer = _Writer(folder, single_file_per_rank=True, sync_files=False)
            dcp.save(
                mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner,
                process_group=self._group,
            )  # fmt: skip
        except dcp.api.CheckpointException as error:
            raise _as_checkpoint_error(error, folder) from error  # already the same on every rank
        self._seal(format_, folder, seal)

    def _seal(self, format_: Any, folder: Path, seal: Callable[[Checksums], None] | None) -> None:
        """Hash each rank's own files in parallel; rank 0 adds the small ones and seals the folder for all."""
        rank = dist.get_rank(self._group)
        mine = _attempt(lambda: {p.name: checksum(p) for p in folder.glob(f"__{rank}_*.distcp")})
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        failed = [e for e in everyone if isinstance(e, BaseException)]
        outcome: list[Any] = [failed[0] if failed else None]
        if rank == 0 and not failed:

            def whole() -> None:
                save_config(CheckpointingConfig(format_.backend, format_.version), str(folder))
                sums: Checksums = {name: entry for each in everyone for name, entry in each.items()}
                sums |= {p.name: checksum(p) for p in folder.iterdir() if p.name not in sums}
                if seal is not None:
                    seal(sums)

            outcome[0] = _attempt(whole)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            raise _as_checkpoint_error(outcome[0], folder)


def _prepare(content: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Content in megatron's flat form. check: that every shard is written once, which all ranks compare."""
    sharded, common = save_preprocess(content, validate_access_integrity=check)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())
    return sharded


def _attempt(work: Callable[[], Any]) -> Any:
    """The result of `work`, or the exception that it raised."""
    try:
        return work()
    except Exception as error:
        return error


def _as_checkpoint_error(error: BaseException, folder: Path) -> CheckpointError:
    """One line about the first cause: which rank, and what the system said."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, dcp.api.CheckpointException):
        rank, failure = next(iter(error.failures.items()))
        cause = failure[0] if isinstance(failure, tuple) else failure
        return CheckpointError(f"{folder}: rank {rank} could not write its part: {_last_line(cause)}")
    return CheckpointError(f"{folder} could not be written: {_last_line(error)}")


def _last_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"
