"""Saving and loading of the DeepSpeed engine, by the rules of every checkpoint here: written beside, hashed, sealed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3train.engine import deepspeed_state, universal
from k3train.engine.saving import Checksums, Saver, _as_checkpoint_error, _attempt, checksum
from k3train.errors import CheckpointError

if TYPE_CHECKING:
    from k3train.engine.deepspeed import DeepSpeedEngine

Files = list[tuple[str, Any]]
"""(path inside the checkpoint, text or what torch.save is given): what one rank writes."""


class UniversalSaver(Saver):
    """One save at a time, in this thread or behind the training steps. Every method is collective."""

    def write(
        self, engine: DeepSpeedEngine, folder: Path, state: dict[str, Any],
        seal: Callable[[Checksums], None] | None, *, wait: bool,
    ) -> None:  # fmt: skip
        """Copy to CPU memory what this rank is to write, then write it now or in a thread."""
        content = _content(engine, state)
        if wait:
            self._open_group()
            self._write(content, folder, seal)
        else:
            self.start(lambda: content, folder, seal)

    def _run(
        self, content: Callable[[], Any], folder: Path, seal: Callable[[Checksums], None] | None, device: int | None
    ) -> None:
        try:
            self._write(content(), folder, seal)
        except BaseException as error:
            self._error = error

    def _write(self, prepared: Any, folder: Path, seal: Callable[[Checksums], None] | None) -> None:
        """Each rank writes and hashes its own files; rank 0 seals the folder for all."""
        rank = dist.get_rank(self._group)
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, _attempt(lambda: write_files(folder, prepared)), group=self._group)
        failed = [(i, e) for i, e in enumerate(everyone) if isinstance(e, BaseException)]
        outcome: list[Any] = [None]
        if failed:
            which, error = failed[0]
            words = str(error) or type(error).__name__
            raise CheckpointError(f"{folder}: rank {which} could not write its part: {words.splitlines()[0]}")
        if rank == 0 and seal is not None:
            sums: Checksums = {name: entry for each in everyone for name, entry in each.items()}
            outcome[0] = _attempt(lambda: seal(sums))
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            raise _as_checkpoint_error(outcome[0], folder)


def write_files(folder: Path, content: Files) -> Checksums:
    """Write files and force them to the disk; their sizes and checksums by path inside the folder."""
    sums: Checksums = {}
    for name, value in content:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            path.write_text(value)
        else:
            _save(value, path)
        sums[name] = checksum(path)
    return sums


def _save(value: Any, path: Path) -> None:
    """torch.save, which names what the system said: torch's zip format hides it behind its own alarm."""
    try:
        torch.save(value, path)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise cause or error from None


def _content(engine: DeepSpeedEngine, state: dict[str, Any]) -> Files:
    """What this rank writes of the engine as it is now, in CPU memory. Collective."""
    optimizer = deepspeed_state.has_stepped(engine)
    steps = {float(p.state["step"]) for p in deepspeed_state.pieces(engine) if "step" in p.state}
    tensors = deepspeed_state.collect(engine, optimizer=optimizer)
    content: Files = list(universal.files(tensors, max(steps, default=0.0) if optimizer else None))
    if dist.get_rank() == 0:
        buffers = {
            name: buffer.detach().to("cpu", torch.float32, copy=True)  # the next step moves it
            for name, buffer in engine.model.named_buffers()
            if getattr(buffer, "k3", None) is not None
        }
        content += [(universal.file_of(name, universal.WEIGHTS), {"param": now}) for name, now in buffers.items()]
        if optimizer:
            content += universal.for_deepspeed(max(steps, default=0.0), buffers)
        dtype = "bf16" if engine.ctx.dtype == torch.bfloat16 else "fp32"
        content.append((universal.ABOUT, universal.about(state, optimizer=optimizer, dtype=dtype)))
    return content


@torch.no_grad()
def load_universal(engine: DeepSpeedEngine, folder: Path, *, optimizer: bool) -> dict[str, Any]:
    """Fill weights, buffers and, if wanted, optimizer state; returns the small state of the run.

    Raises CheckpointError where the folder lacks what this run needs.
    """
    about = universal.read_about(folder)
    optimizer = optimizer and about["optimizer"]
    if not optimizer:
        engine.optimizer.optimizer.state.clear()
    for piece in deepspeed_state.pieces(engine):
        states = deepspeed_state.state_keys(engine, piece.name) if optimizer else ()
        for key in (universal.WEIGHTS, *states):
            whole = universal.read(folder, piece.name, key)
            # DeepSpeed's converter flattens what ZeRO-3 had cut
            if tuple(whole.shape) not in (piece.shape, (math.prod(piece.shape),)):
                raise CheckpointError(
                    f"{folder}: {key} of {piece.name} has shape {list(whole.shape)}, the model's is "
                    f"{list(piece.shape)}: it was written by another model"
                )
            if key not in (universal.WEIGHTS, *piece.state):
                piece.state[key] = torch.zeros_like(piece.flat)
            piece.of(key).copy_(piece.slice_of(whole))
        if "exp_avg" in states:
            piece.state["step"] = universal.read(folder, piece.name, "step").clone()
    deepspeed_state.refresh_model(engine)
    for name, buffer in engine.model.named_buffers():
        if getattr(buffer, "k3", None) is not None:
            buffer.copy_(universal.read(folder, name))
    return about["state"]
