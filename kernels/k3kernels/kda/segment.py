"""Splitting one packed stream over ranks (context parallelism): what a rank must tell the ranks after it.

The recurrence is linear in the state, so a contiguous piece of the stream acts on the state that enters it as

    S_out = M S_in + S        M [HV, K, K], S [HV, K, V], both fp32

where S is what the piece leaves when nothing enters. A document border inside the piece (or at its end) cuts the
dependence: then M = 0, and S is what the tokens after the last border leave. So a rank needs no knowledge of borders
elsewhere, and the fold over preceding ranks has no conditions. For rank r that holds tokens [start, end):

    local = local_cu_seqlens(cu_seqlens, start, end)
    M, S = kda_segment(k, v, z, beta, A_log, dt_bias, bound=bound, cu_seqlens=local)
    all_M, all_S = differentiable all_gather of M and S                      # [R, HV, K, K], [R, HV, K, V]
    entering = fold_segments(all_M[:r], all_S[:r])                           # [HV, K, V]
    o, _ = kda(q, k, v, z, beta, A_log, dt_bias, bound=bound, cu_seqlens=local,
               initial_state=first_document_state(entering, len(local) - 1))

Gradients flow through all of it by autograd: into k, v, z, beta, A_log and dt_bias twice (through `kda` and through
`kda_segment`), and from the ranks behind through the backward of the all_gather, a reduce-scatter with sum. Every rank
must take part in it, also one whose piece is empty. Pieces need not be equal; a rank with several pieces (zigzag) gives
one summary per piece, and the fold runs in the order of the stream.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.checks import check_bound, check_cu_seqlens
from k3kernels.kda.naive import compute_dtype
from k3kernels.kda.ops import TRITON_SIZES, check_arguments, kda, pick_backend
from k3kernels.live_rows import live_rows


def local_cu_seqlens(cu_seqlens: Tensor, start: int, end: int) -> Tensor:
    """Boundaries of the document pieces inside tokens [start, end) of a packed stream, counted from `start`.

    The first piece is the one that continues the document before it, if any does. A border exactly at `start` belongs
    to the piece before (whose summary then is zero, so that nothing enters here). A border exactly at `end` gives a
    last, empty piece, by which `kda_segment` knows that nothing leaves.

    cu_seqlens: integer [N+1], the whole stream's, on the CPU. Returns int32 [pieces + 1].
    """
    bounds = cu_seqlens.tolist()
    if not 0 <= start <= end <= bounds[-1]:
        raise ValueError(f"start, end: expected 0 <= start <= end <= {bounds[-1]}, got {start}, {end}")
    inside = [b - start for b in bounds[1:] if start < b <= end]
    return torch.tensor([0, *inside, end - start], dtype=torch.int32)


def kda_segment(
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None = -5.0,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """How the state at the end of a stream depends on the state at its start: S_out = M S_in + S.

    Args: as in `k3kernels.kda.kda`, with B = 1. cu_seqlens: pieces of the local stream (see `local_cu_seqlens`); its
        values are read on the host, so keep it on the CPU. None means one piece.
        start: instead of cu_seqlens, where the last piece begins: an integer tensor [1] on k's device, 0 <= start <= T,
        which on a GPU nobody reads on the host, so that a captured step may be replayed with another value. M and S are
        those of the tokens from there on: whoever knows of a border sets M to zero.

    Returns:
        M [HV, K, K] and S [HV, K, V], fp32 (fp64 for fp64 inputs), differentiable. M = 0 when a border cuts the stream
        (not with `start`); M = I and S = 0 for an empty stream without a border.

    Raises:
        ValueError, TypeError: as in `kda`.
    """
    if k.dim() != 4 or k.shape[0] != 1:
        raise ValueError(f"k: a segment is one stream [1, T, H, K], got {list(k.shape)}")
    T, K = k.shape[1], k.shape[3]
    HV, V = v.shape[-2:]
    if start is not None:
        _check_start(start, cu_seqlens, k)
    pieces = 1 if cu_seqlens is None else check_cu_seqlens(cu_seqlens, 1, T)
    on_triton = pick_backend(backend, k, k, v) == "triton"
    borders: Tensor | None = None  # of a last piece whose place the host does not know
    run: Callable[..., tuple[Tensor, Tensor | None]] = partial(kda, backend=backend)
    if start is not None and on_triton:
        from k3kernels.kda.triton.api import kda_triton as run  # imports triton, which CPU users may lack

        check_arguments(k, k, v, z, beta, A_log, dt_bias, None, None)
        bound = check_bound(bound)
        # The kernels' grids follow from T alone and their chunk table from the borders: chunks before `start` are in no
        # document's list, so nobody computes them. Nor does anybody write their gradients.
        borders = torch.cat([start, start.new_full((1,), T)]).to(torch.int32)
        k, v, z, beta = (live_rows(x, start, dim=1) for x in (k, v, z, beta))
    else:
        begin = int(cu_seqlens[-2]) if cu_seqlens is not None else 0 if start is None else int(start)
        k, v, z, beta = (x[:, begin:] for x in (k, v, z, beta))
    dtype = compute_dtype(k, v, z, beta, A_log, dt_bias)

    def end_state(values: Tensor, entering: Tensor | None) -> Tensor:
        """Where the state pass ends with these values [1, T, HV, columns]; the output is not used."""
        columns = values.shape[-1]
        padding = max(16, 1 << (columns - 1).bit_length()) - columns if on_triton else 0  # it takes powers of two
        if padding:
            values = F.pad(values, (0, padding))
            entering = None if entering is None else F.pad(entering, (0, padding))
        _, end = run(
            k.detach(), k, values, z, beta, A_log, dt_bias, bound=bound, initial_state=entering, cu_seqlens=borders,
            output_final_state=True,
        )  # fmt: skip
        assert end is not None
        return end[0, ..., :columns]

    if pieces > 1:
        S = end_state(v, None)
        return S.new_zeros(HV, K, K), S
    # The recurrence is linear in (values, state): run on [v | 0] from [0 | I] it ends in [S | M].
    identity = torch.eye(K, dtype=dtype, device=k.device).expand(1, HV, K, K)
    if on_triton and max(TRITON_SIZES) < V + K:
        S = end_state(v, None)
        return end_state(v.new_zeros(()).expand(*v.shape[:3], K), identity), S
    end = end_state(F.pad(v, (0, K)), F.pad(identity, (V, 0)))
    return end[..., V:], end[..., :V]


def _check_start(start: Tensor, cu_seqlens: Tensor | None, k: Tensor) -> None:
    if cu_seqlens is not None:
        raise ValueError("start: give it or cu_seqlens, not both")
    if start.shape != (1,) or start.dtype not in (torch.int32, torch.int64) or start.device != k.device:
        raise ValueError(
            f"start: expected int32 or int64 [1] on {k.device}, got {start.dtype} {list(start.shape)} on {start.device}"
        )
    if start.device.type == "cpu" and not 0 <= int(start) <= k.shape[1]:
        raise ValueError(f"start: expected 0 <= start <= T = {k.shape[1]}, got {int(start)}")


def fold_segments(M: Tensor, S: Tensor) -> Tensor:
    """The state that leaves a row of pieces when nothing enters: S <- M_j S + S_j in the order of the stream.

    M [R, HV, K, K], S [R, HV, K, V]; R = 0 gives zeros. Returns [HV, K, V] in their dtype; keep it fp32, since the
    product over many pieces loses accuracy in anything less.
    """
    if M.shape[:-1] != S.shape[:-1] or M.shape[-1] != M.shape[-2]:
        raise ValueError(f"M, S: expected [R, HV, K, K] and [R, HV, K, V], got {list(M.shape)} and {list(S.shape)}")
    state = S.new_zeros(S.shape[1:])
    for j in range(M.shape[0]):
        state = M[j] @ state + S[j]
    return state


def first_document_state(entering: Tensor, documents: int) -> Tensor:
    """Initial states [documents, HV, K, V]: the entering state [HV, K, V] for the first piece, zero for the others."""
    if documents < 1:
        raise ValueError(f"documents: expected at least 1, got {documents}")
    return torch.cat([entering.unsqueeze(0), entering.new_zeros(documents - 1, *entering.shape)])
