"""DeepSpeed's universal checkpoint as files: whole fp32 tensors, one file a parameter and state.

    zero/NAME/fp32.pt        {"param": tensor}: weights; also buffers, such as router biases
    zero/NAME/exp_avg.pt     the optimizer's states under their torch names, and step.pt
    k3train.json             which engine wrote it, and the small state of the run
    zero/optimizer_state.pt, [zero_pp_rank_0_]mp_rank_00_model_states.pt
                             what DeepSpeed's own load_checkpoint asks for beside the tensors; never read here

Any number of ranks and any ZeRO stage read it, a parameter at a time. Every file is opened with `weights_only`: nothing
in it is run. Nothing here needs the deepspeed package.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from k3train.errors import CheckpointError, WeightsError

ABOUT = "k3train.json"
FOLDER = "zero"
WEIGHTS = "fp32"
FORMAT = "deepspeed-universal"
DEEPSPEED_VERSION = "0.19.8"  # whose load_checkpoint was tested with these files


def is_universal(folder: Path) -> bool:
    """Whether a checkpoint folder is of this format."""
    return (folder / ABOUT).is_file() and (folder / FOLDER).is_dir()


def file_of(name: str, key: str) -> str:
    """Path inside the checkpoint."""
    return f"{FOLDER}/{name}/{key}.pt"


def about(state: dict[str, Any], *, optimizer: bool, dtype: str) -> str:
    """The text of k3train.json. optimizer: whether the optimizer's states are there too. dtype: bf16 | fp32, in which
    the model was trained."""
    content = {"format": FORMAT, "optimizer": optimizer, "dtype": dtype, "state": state}
    return json.dumps(content, indent=1, sort_keys=True)


def read_about(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError where the folder is no universal checkpoint of ours."""
    try:
        content = json.loads((folder / ABOUT).read_text())
        if content["format"] == FORMAT:
            return content
    except (OSError, ValueError, KeyError, TypeError):
        pass
    hint = ""
    if (folder / ".metadata").is_file():
        hint = (
            "; it is the megatron engine's: type engine=megatron, or make a run of it that DeepSpeed can go on with: "
            f"k3train convert {folder} --to deepspeed --output OTHER"
        )
    raise CheckpointError(f"{folder} is not a checkpoint of the DeepSpeed engine{hint}")


def names(folder: Path) -> list[str]:
    """Parameters and buffers in a checkpoint."""
    return sorted(p.parent.name for p in (folder / FOLDER).glob(f"*/{WEIGHTS}.pt"))


def read(folder: Path, name: str, key: str = WEIGHTS) -> torch.Tensor:
    """The whole tensor, fp32 on CPU, mapped from the file. Raises CheckpointError."""
    path = folder / file_of(name, key)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {key} of {name}: it was written by another model or another optimizer; type these as "
            "they were, or start another run from its weights alone: run.name=OTHER checkpoint.load=... "
            "checkpoint.load_optimizer=false"
        ) from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error
    tensor = content["param"] if isinstance(content, dict) else content
    return tensor if isinstance(tensor, torch.Tensor) else torch.tensor(float(tensor))


class UniversalSource:
    """A `TensorSource` (k3train.weights.source) over one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = set(names(folder))

    def names(self) -> list[str]:
        """Our names of the weights in the checkpoint."""
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._mapped(name).shape)

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The whole tensor, or one index of its first axis, in fp32."""
        tensor = self._mapped(name)
        return (tensor if expert is None else tensor[expert]).clone()

    def _mapped(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise WeightsError(f"{self.folder} has no tensor {name}; the configuration describes another model")
        return read(self.folder, name)


def files(tensors: dict[str, dict[str, torch.Tensor]], step: float | None) -> Iterator[tuple[str, Any]]:
    """(path inside the checkpoint, what torch.save is given) for tensors by parameter and key."""
    for name, by_key in tensors.items():
        for key, tensor in by_key.items():
            yield file_of(name, key), {"param": tensor}
        if step is not None and len(by_key) > 1:
            yield file_of(name, "step"), torch.tensor(float(step))


def for_deepspeed(step: float, buffers: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """(path inside the checkpoint, what torch.save is given) of what `load_checkpoint` of DeepSpeed itself needs too.

    step: of the optimizer. buffers: fp32; DeepSpeed restores parameters alone, so its caller finds these in the client
    state that it gets. Groups carry no settings: DeepSpeed would overwrite those of the run that loads, in stage 3 all
    by those of the first group.
    """
    groups: list[dict[str, Any]] = [{} for _ in range(256)]  # it takes as many as the optimizer that loads has
    state = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}
    yield f"{FOLDER}/optimizer_state.pt", {
        "ds_version": DEEPSPEED_VERSION, "param_groups": groups, "optimizer_state_dict": state,
    }  # fmt: skip
    about = {
        "module": {}, "buffers": buffers, "ds_version": DEEPSPEED_VERSION, "dp_world_size": 1, "mp_world_size": 1,
        "global_steps": int(step), "skipped_steps": 0,
    }  # fmt: skip
    yield "mp_rank_00_model_states.pt", about  # stages 1 and 2 ask for this one
    yield "zero_pp_rank_0_mp_rank_00_model_states.pt", about
