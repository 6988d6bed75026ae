"""`gated_rms_norm` is the norm of the attention output, `layer_rms_norm` that of layers and latents.

`k3kernels.norm.rms` has the latter without gradients, for decoding.
"""

from k3kernels.norm.layer import layer_rms_norm
from k3kernels.norm.ops import gated_rms_norm

__all__ = ["gated_rms_norm", "layer_rms_norm"]
