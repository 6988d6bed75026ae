"""The public entries of SiTU-GLU."""

from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend
from k3kernels.situ.reference import situ_glu_torch

BACKENDS = ("auto", "torch", "triton")


def situ_glu(
    gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None, scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """[beta tanh(gate / beta) sigmoid(gate)] [linear_beta tanh(up / linear_beta)] scale (Kimi K3 report equation 12).

    Args:
        gate, up: [N, h], one dtype; fp32, bf16, fp16 (fp64: torch only). Rows may be strided.
        beta, linear_beta: bounds of the branches, positive; linear_beta None leaves up unbounded.
        scale: [N], one factor a row (an expert's weight), or None.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        [N, h] like gate; computed in fp32 and rounded once. Gradients flow to all tensors; Triton keeps only these.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("gate", gate, (None, None), "[N, h]")
    check_tensor("up", up, tuple(gate.shape), "[N, h]")
    if up.dtype != gate.dtype:
        raise TypeError(f"up: expected {gate.dtype} like gate, got {up.dtype}")
    backend = _checked(gate, beta, linear_beta, scale, backend)
    check_same_device("gate", gate, {"up": up})
    if backend == "triton":
        from k3kernels.situ.triton_situ import TritonSiTU

        return TritonSiTU.apply(gate, up, scale, beta, linear_beta)
    return situ_glu_torch(gate, up, scale, beta, linear_beta)


def situ_glu_packed(
    x: Tensor, *, beta: float, linear_beta: float | None, scale: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`situ_glu` of the output [N, 2h] of one product: gate in the first half of a row, up in the second."""
    check_tensor("x", x, (None, None), "[N, 2h]")
    if x.shape[1] % 2:
        raise ValueError(f"x: expected an even number of columns, gate and up, got {x.shape[1]}")
    backend = _checked(x, beta, linear_beta, scale, backend)
    if backend == "triton":
        from k3kernels.situ.triton_situ import TritonSiTUPacked

        return TritonSiTUPacked.apply(x, scale, beta, linear_beta)
    gate, up = x.chunk(2, -1)
    return situ_glu_torch(gate, up, scale, beta, linear_beta)


def _checked(x: Tensor, beta: float, linear_beta: float | None, scale: Tensor | None, backend: str) -> str:
    """The arguments that both entries share; the backend chosen."""
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    if scale is not None:
        check_tensor("scale", scale, (x.shape[0],), "[N]")
        check_same_device("gate", x, {"scale": scale})
    return choose_backend(backend, BACKENDS, x)
