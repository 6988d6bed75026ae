"""What a forked run has imported before it exists."""

from __future__ import annotations

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

torch.set_num_threads(1)

from k3train.platform import cpu  # noqa: E402

cpu.install()

import hydra  # noqa: F401, E402
import matplotlib.pyplot  # noqa: F401, E402
import tokenizers  # noqa: F401, E402
from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset  # noqa: F401, E402

import k3data.dataset  # noqa: F401, E402
import k3data.loader  # noqa: F401, E402
import k3train.config.compose  # noqa: F401, E402
import k3train.engine.megatron  # noqa: F401, E402
import k3train.planning.flops  # noqa: F401, E402
import k3train.tracking.tracker  # noqa: F401, E402
import k3train.train.callbacks.guard  # noqa: F401, E402
import k3train.train.callbacks.statistics  # noqa: F401, E402
import k3train.train.data  # noqa: F401, E402
import k3train.train.run  # noqa: F401, E402
