"""What surrounds the attention of Gated MLA: `assemble_keys` before it, `sigmoid_gate` behind it."""

from k3kernels.gated_mla.ops import assemble_keys, sigmoid_gate

__all__ = ["assemble_keys", "sigmoid_gate"]
