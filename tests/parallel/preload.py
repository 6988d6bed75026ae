# ruff: noqa: E402
"""What a rank of the pool has imported before it exists: the fork server loads this once and forks ranks from it."""

from __future__ import annotations

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from k3train.platform import cpu

cpu.install()

import k3train.engine.megatron  # noqa: F401
from k3train.platform import install_adam

install_adam()
