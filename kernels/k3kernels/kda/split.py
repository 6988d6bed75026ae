"""One long stream as several: segment-parallel state passing inside one device.

The state pass is serial over a document and runs one program a head, so a long document with few heads leaves a GPU
idle. Here the document is cut into segments. A first pass, all segments at once, finds how each acts on the state that
enters it (S_out = M S_in + S); a fold over the segments gives every segment its entering state; the ordinary pass then
runs on all segments at once, from those states. The work grows by one state pass on V + K columns, the serial length
falls by the number of segments: it pays where heads times batch are far fewer than the device's multiprocessors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.checks import check_cu_seqlens
from k3kernels.kda.naive import compute_dtype
from k3kernels.kda.ops import TRITON_SIZES, check_arguments, kda, pick_backend


def kda_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    segment_length: int,
    bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`k3kernels.kda.kda` with documents longer than `segment_length` tokens cut into segments of that length.

    Args: as in `kda`. cu_seqlens is read on the host, so keep it on the CPU. segment_length: best a multiple of 64.

    Returns:
        o and final states as `kda` gives them, up to rounding; differentiable in everything.

    Raises:
        ValueError, TypeError: as in `kda`; segment_length below 1; V + K beyond what the Triton path takes.
    """
    check_arguments(q, k, v, z, beta, A_log, dt_bias, initial_state, cu_seqlens)
    if segment_length < 1:
        raise ValueError(f"segment_length: expected at least 1, got {segment_length}")
    B, T, _, K = k.shape
    HV, V = v.shape[-2:]
    documents = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    bounds, first = _cut(documents, segment_length)
    settings = {"bound": bound, "scale": scale, "backend": backend}
    if len(bounds) == len(documents):
        return kda(
            q, k, v, z, beta, A_log, dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
            output_final_state=output_final_state, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
    q, k, v, z, beta = (x.reshape(1, B * T, *x.shape[2:]) for x in (q, k, v, z, beta))
    pieces = torch.tensor(bounds, dtype=torch.int32)
    M, S = _actions(k, v, z, beta, A_log, dt_bias, pieces, bound, backend)
    entering, state = [], S.new_zeros(HV, K, V)
    for piece, document in enumerate(first):
        if document is not None:
            state = S.new_zeros(HV, K, V) if initial_state is None else initial_state[document].to(S.dtype)
        entering.append(state)
        state = M[piece] @ state + S[piece]
    o, ends = kda(
        q, k, v, z, beta, A_log, dt_bias, initial_state=torch.stack(entering), cu_seqlens=pieces,
        output_final_state=output_final_state, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    if ends is not None:
        last = [piece for piece in range(len(first)) if piece + 1 == len(first) or first[piece + 1] is not None]
        ends = ends[last]
    return o.reshape(B, T, HV, V), ends


def _cut(documents: list[int], length: int) -> tuple[list[int], list[int | None]]:
    """Borders of the pieces, and for each piece the document that begins with it, or None where one goes on."""
    bounds: list[int] = [0]
    first: list[int | None] = []
    for number, (start, end) in enumerate(zip(documents, documents[1:])):
        cuts = [*range(start + length, end, length), end]
        bounds += cuts
        first += [number, *[None] * (len(cuts) - 1)]
    return bounds, first


def _actions(
    k: Tensor, v: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, pieces: Tensor,
    bound: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """M [N, HV, K, K] and S [N, HV, K, V] of every piece: the state pass on [v | 0] from [0 | I] ends in [S | M]."""
    K, (HV, V) = k.shape[-1], v.shape[-2:]
    columns, padding = V + K, 0
    if pick_backend(backend, k, k, v) == "triton":
        if columns > max(TRITON_SIZES):
            raise ValueError(
                f"v: V + K = {V} + {K} is more than {max(TRITON_SIZES)}; use backend='torch' or no segments"
            )
        padding = max(16, 1 << (columns - 1).bit_length()) - columns  # it takes powers of two
    dtype = compute_dtype(k, v, z, beta, A_log, dt_bias)
    identity = torch.eye(K, dtype=dtype, device=k.device).expand(len(pieces) - 1, HV, K, K)
    _, ends = kda(
        k.detach(), k, F.pad(v, (0, K + padding)), z, beta, A_log, dt_bias, bound=bound, cu_seqlens=pieces,
        initial_state=F.pad(identity, (V, padding)), output_final_state=True, backend=backend,
    )  # fmt: skip
    assert ends is not None
    return ends[..., V:columns], ends[..., :V]
