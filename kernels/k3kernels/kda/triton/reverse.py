"""Stage 1 of the backward pass: the adjoint of the state, serial over a document's chunks from the last to the first.

  dV' = A^T dO + Kb dS      Y = M^T dV'  (= gradient of X)      dS <- diag(Gam) dS + Q+^T dO - K+^T (b Y)

Kept transposed like the forward state.  Stores Y and, for every chunk, the gradient of the chunk's end state.
"""

import triton
import triton.language as tl

from .common import dot
from .state import document


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def reverse_kernel(
    do_ptr,
    doc_ptr,
    Qp_ptr,
    Kp_ptr,
    Kb_ptr,
    A_ptr,
    M_ptr,
    gam_ptr,
    row_ptr,
    dST_ptr,
    dS_ptr,
    Y_ptr,
    dS0_ptr,
    do_sb,
    do_st,
    do_sh,
    T,
    NT,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HAS_DST: tl.constexpr,
    DS0: tl.constexpr,
    VARLEN: tl.constexpr,
    DT: tl.constexpr,
    NS: tl.constexpr,
    IP: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = (pid // NV) % HV
    seg = pid // (NV * HV)
    b, cg0, chunks, row0, end = document(doc_ptr, seg, T, NT, VARLEN)
    ii = tl.arange(0, 64)
    d = tl.arange(0, K)
    vv = iv * BV + tl.arange(0, BV)
    sp = (tl.cast(seg, tl.int64) * HV + hv) * (K * V) + d[None, :] * V + vv[:, None]
    if HAS_DST:
        dS = tl.load(dST_ptr + sp).to(tl.float32)
    else:
        dS = tl.zeros((BV, K), tl.float32)
    tile = (tl.cast(cg0, tl.int64) + chunks - 1) * HV + hv
    kp = tile * (64 * K) + ii[:, None] * K + d[None, :]
    ap = tile * 4096 + ii[:, None] * 64 + ii[None, :]
    hp = dS_ptr + tile * (V * K) + vv[:, None] * K + d[None, :]
    yp = Y_ptr + tile * (64 * V) + ii[:, None] * V + vv[None, :]
    gp = gam_ptr + tile * K + d
    bp = row_ptr + tile * 512 + ii
    do_ptr += tl.cast(b, tl.int64) * do_sb + tl.cast(row0, tl.int64) * do_st + tl.cast(hv, tl.int64) * do_sh
    for c in tl.range(0, chunks, num_stages=NS):
        Kb = tl.load(Kb_ptr + kp)
        A = tl.load(A_ptr + ap)
        M = tl.load(M_ptr + ap)
        Kp = tl.load(Kp_ptr + kp)
        Qp = tl.load(Qp_ptr + kp)
        gam = tl.load(gp)
        beta = tl.load(bp)
        row = tl.cast(chunks - 1 - c, tl.int64) * 64 + ii
        do = tl.load(do_ptr + row[:, None] * do_st + vv[None, :], mask=(row < end - row0)[:, None], other=0.0)
        dSb = dS.to(DT)
        tl.store(hp, dSb)
        dV = tl.dot(dSb, tl.trans(Kb), input_precision=IP)
        dV = dot(tl.trans(do), A, dV, IP)
        Y = tl.dot(dV.to(DT), M, input_precision=IP)
        dS = dot(tl.trans(do), Qp, dS * gam[None, :], IP)
        dS = dot((Y * (-beta[None, :])).to(DT), Kp, dS, IP)
        tl.store(yp, tl.trans(Y.to(DT)))
        kp -= HV * (64 * K)
        ap -= HV * 4096
        hp -= HV * (V * K)
        yp -= HV * (64 * V)
        gp -= HV * K
        bp -= HV * 512
    if DS0:
        tl.store(dS0_ptr + sp, dS)
