"""Without a GPU the Triton kernels run under Triton's interpreter, which must be asked for before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
