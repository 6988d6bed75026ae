"""The golden model as a checkpoint folder, and small changes to one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "k3_tiny_a"
MOE = "language_model.model.layers.{}.block_sparse_moe."


def golden_tensors() -> dict[str, torch.Tensor]:
    return load_file(TINY / "model.safetensors")


def golden_config() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text())


def k3_quantization() -> dict[str, Any]:
    return json.loads((GOLDEN / "mxfp4" / "k3_quantization_config_fixed_ignore.json").read_text())


def golden_folder(folder: Path, *, packed: bool = False) -> Path:
    """A folder with the golden model, BF16 or with its routed experts in MXFP4 as the release ships them."""
    folder.mkdir(parents=True, exist_ok=True)
    if not packed:
        shutil.copy(TINY / "model.safetensors", folder)
        shutil.copy(TINY / "config.json", folder)
        return folder
    tensors = {name: t for name, t in golden_tensors().items() if ".experts." not in name or "shared" in name}
    save_file(tensors | load_file(TINY / "experts_mxfp4.safetensors"), folder / "model.safetensors")
    config = golden_config()
    config["text_config"]["quantization_config"] = k3_quantization()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Rewrite the single file of `folder` after `change` edited its tensors in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder, read by the reference library alone."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
