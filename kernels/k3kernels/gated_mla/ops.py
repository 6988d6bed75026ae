"""The public entries around the attention of Gated MLA (Kimi K3 report equation 7)."""

from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend
from k3kernels.gated_mla.reference import assemble_keys_torch, sigmoid_gate_torch

BACKENDS = ("auto", "torch", "triton")


def assemble_keys(kv: Tensor, shared: Tensor, nope_dim: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Keys of every head, their own channels and then those that all heads share, and values.

    Args:
        kv: [T, H, nope_dim + v], keys' own channels and then values of each head; fp32, bf16, fp16 (fp64: torch only).
        shared: [T, s] in kv's dtype. Rows may be strided.
        nope_dim: keys' own channels, 0 < nope_dim < kv.shape[-1].
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        k [T, H, nope_dim + s] and v [T, H, v]. Triton makes both contiguous, in one pass, and keeps nothing for backward;
        torch's v is a view of kv. Gradients flow to kv and shared; Triton adds up shared's over heads in fp32 and rounds it
        once, and where `PEAKS.wanted` notes the peak of kv's.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("kv", kv, (None, None, None), "[T, H, nope_dim + v]")
    check_tensor("shared", shared, (kv.shape[0], None), "[T, s]")
    if shared.dtype != kv.dtype:
        raise TypeError(f"shared: expected {kv.dtype} like kv, got {shared.dtype}")
    if not 0 < nope_dim < kv.shape[2]:
        raise ValueError(f"nope_dim: expected more than 0 and less than kv's {kv.shape[2]} channels, got {nope_dim}")
    check_same_device("kv", kv, {"shared": shared})
    if choose_backend(backend, BACKENDS, kv) == "triton":
        from k3kernels.gated_mla.triton_keys import TritonKeys

        return TritonKeys.apply(kv, shared, nope_dim)
    return assemble_keys_torch(kv, shared, nope_dim)


def sigmoid_gate(o: Tensor, gate: Tensor, *, backend: str = "auto") -> Tensor:
    """o * sigmoid(gate).

    Args:
        o, gate: [..., C], one shape; fp32, bf16, fp16 (fp64: torch only), o perhaps in another dtype than gate.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        [..., C] in the gate's dtype. Triton computes it and the gradients in fp32 and rounds once, keeps only o and gate,
        and where `PEAKS.wanted` notes the peaks of the result and of the gate's gradient.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    if not isinstance(o, Tensor) or o.dim() < 1:
        raise TypeError(f"o: expected a tensor [..., C], got {o!r}")
    check_tensor("o", o, (None,) * o.dim(), "[..., C]")
    check_tensor("gate", gate, tuple(o.shape), "[..., C]")
    check_same_device("o", o, {"gate": gate})
    if choose_backend(backend, BACKENDS, o, gate) == "triton":
        from k3kernels.gated_mla.triton_gate import TritonSigmoidGate

        return TritonSigmoidGate.apply(o, gate)
    return sigmoid_gate_torch(o, gate)
