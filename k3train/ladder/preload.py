"""What a forked arm has imported before it exists."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# asking CUDA itself whether there is a GPU would keep every process forked later from using it
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from k3train import platform  # noqa: E402

platform.install()

import hydra  # noqa: F401, E402
import tokenizers  # noqa: F401, E402

import k3data.loader  # noqa: F401, E402
import k3data.recall  # noqa: F401, E402
import k3train.config.compose  # noqa: F401, E402
import k3train.engine.megatron  # noqa: F401, E402
import k3train.ladder.train  # noqa: F401, E402
import k3train.train.callbacks.evaluation  # noqa: F401, E402
import k3train.train.callbacks.statistics  # noqa: F401, E402
import k3train.train.data  # noqa: F401, E402
