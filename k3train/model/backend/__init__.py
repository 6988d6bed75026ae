"""Which linear, norm, attention and grouped-GEMM classes the model is built of; the modules never ask which they have.

`local` runs anywhere; `torch` adds torch's GPU kernels; `te` is transformer-engine.
"""

from k3train.model.backend.local import Backend
from k3train.model.backend.select import make_backend

__all__ = ["Backend", "make_backend"]
