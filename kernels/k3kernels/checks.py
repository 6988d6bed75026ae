"""Argument checks shared by the public entries: an error names the argument, the rule and the value.

Values that live on a GPU are never read here, since that would stall the device: `cu_seqlens` on CUDA is checked
for shape and dtype only.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# exp of 15 steps of decay must stay inside fp32 (see kda_chunk): |bound| < 128 / (15 log2 e) = 5.915
LOWEST_BOUND = -5.9


def check_tensor(name: str, value: object, shape: Sequence[int | None], legend: str) -> Tensor:
    """A floating-point tensor of this shape (None leaves a size free); returns it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {legend}, got {type(value).__name__}")
    if value.dim() != len(shape) or any(want is not None and have != want for have, want in zip(value.shape, shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape {legend} = [{wanted}], got {list(value.shape)}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {value.dtype}")
    return value


def check_same_device(reference_name: str, reference: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """All tensors must live where the reference does."""
    for name, value in others.items():
        if value is not None and value.device != reference.device:
            raise ValueError(f"{name}: expected on {reference.device}, where {reference_name} is, got {value.device}")


def check_cu_seqlens(cu_seqlens: object, batch: int, tokens: int) -> int:
    """Document boundaries 0 = c_0 <= c_1 <= ... <= c_N = T of one packed stream; returns N."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an integer tensor [N+1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: expected shape [N+1] with N >= 1, got {list(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens: a packed stream has batch size 1, got B = {batch}")
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens:
            raise ValueError(f"cu_seqlens: must start at 0 and end at T = {tokens}, got {bounds[0]} ... {bounds[-1]}")
        for i in range(len(bounds) - 1):
            if bounds[i + 1] < bounds[i]:
                raise ValueError(
                    f"cu_seqlens: must not decrease, got {bounds[i]} then {bounds[i + 1]} at index {i + 1}"
                )
    return cu_seqlens.numel() - 1


def check_bound(bound: object) -> float | None:
    """The lower bound of the log decay per step: a number in [-5.9, 0), or None for the unbounded softplus gate."""
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise TypeError(f"bound: expected a number in [{LOWEST_BOUND}, 0) or None, got {bound!r}")
    if not LOWEST_BOUND <= bound < 0:
        raise ValueError(f"bound: expected a number in [{LOWEST_BOUND}, 0) or None (softplus gate), got {bound}")
    return float(bound)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def choose_backend(backend: str, choices: Sequence[str], *tensors: Tensor) -> str:
    """`backend`, one of `choices`; for auto triton where all tensors are on CUDA and of 32 bits or fewer, else torch."""
    check_choice("backend", backend, choices)
    if backend != "auto":
        return backend
    return "triton" if all(x.is_cuda and x.element_size() < 8 for x in tensors) else "torch"


def check_heads(key_heads: int, value_heads: int) -> None:
    """Value heads come in whole groups per key head."""
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"v: its {value_heads} heads must be a multiple of the {key_heads} heads of q and k")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """The arguments that all mixers share; the state is [N, HV, K, V]."""
    check_tensor("q", q, (None,) * 4, "[B, T, H, K]")
    B, T, H, K = q.shape
    check_tensor("k", k, (B, T, H, K), "[B, T, H, K]")
    check_tensor("v", v, (B, T, None, None), "[B, T, HV, V]")
    HV, V = v.shape[-2:]
    check_heads(H, HV)
    documents = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (documents, HV, K, V), "[N, HV, K, V]")
    check_same_device("q", q, {"k": k, "v": v, "initial_state": initial_state})
