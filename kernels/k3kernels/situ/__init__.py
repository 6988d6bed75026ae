"""SiTU-GLU, a gated unit whose two branches saturate: `situ_glu` and `situ_glu_packed` are the entries."""

from k3kernels.situ.ops import situ_glu, situ_glu_packed

__all__ = ["situ_glu", "situ_glu_packed"]
