"""Stage 2 of the backward pass, parallel over chunks: every product that contracts or spans the value channels.

  dA = s stril(dO V'^T)      dL = -beta stril(Y V'^T)        three 32 x 32 blocks each, strictly causal
  P  = s dO S^T, -beta Y S^T, V' dS^T   [64, K]               state terms of dq, dk
  W  = Gam . rowsum_V(S . dS)   [K]                           state term of the gate's gradient
  dv = beta Y
(dL here is the gradient of beta's cofactor in L, k_i . k_j e^(G_i - G_j).)  Four row sums replace what would otherwise
be reductions over the next stage's key channels: a token's output is linear in its q, its update quadratic in its k.
  q . dq = o . dO      k . dk = 2 Y . V' - beta Y . v      dbeta_logit = (1 - beta) Y . V'      dA_ii = dO_i . V'_i
"""

import triton
import triton.language as tl

from .common import chunk_rows, dot


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def vside_kernel(
    v_ptr,
    o_ptr,
    do_ptr,
    table_ptr,
    Y_ptr,
    vn_ptr,
    h_ptr,
    dS_ptr,
    gam_ptr,
    row_ptr,
    dv_ptr,
    db_ptr,
    dA_ptr,
    dL_ptr,
    P_ptr,
    w_ptr,
    v_sb,
    v_st,
    v_sh,
    do_sb,
    do_st,
    do_sh,
    T,
    NT,
    HV,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VARLEN: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    cg = pid // HV
    b, row0, n = chunk_rows(table_ptr, cg, T, NT, VARLEN)
    if n <= 0:
        return
    tile = tl.cast(pid, tl.int64)
    ii = tl.arange(0, 64)
    live = (ii < n)[:, None]
    b64 = tl.cast(b, tl.int64)
    r64 = tl.cast(row0, tl.int64)
    out = ((b64 * T + r64) * HV + hv) * V
    v_ptr += b64 * v_sb + r64 * v_st + tl.cast(hv, tl.int64) * v_sh
    do_ptr += b64 * do_sb + r64 * do_st + tl.cast(hv, tl.int64) * do_sh
    i64 = ii.to(tl.int64)[:, None]
    beta = tl.load(row_ptr + tile * 512 + ii)
    q_dq = tl.zeros((64,), tl.float32)
    y_vn = tl.zeros((64,), tl.float32)
    y_v = tl.zeros((64,), tl.float32)
    a_d = tl.zeros((64,), tl.float32)
    dA = tl.zeros((64, 64), tl.float32)
    dL = tl.zeros((64, 64), tl.float32)
    for v0 in tl.static_range(0, V, BV):
        e = v0 + tl.arange(0, BV)
        en = e[None, :]
        do = tl.load(do_ptr + i64 * do_st + en, mask=live, other=0.0)
        Y = tl.load(Y_ptr + tile * (64 * V) + ii[:, None] * V + en)
        Vn = tl.load(vn_ptr + tile * (64 * V) + ii[:, None] * V + en)
        VnT = tl.trans(Vn)
        dA = dot(do, VnT, dA, IP)
        dL = dot(Y, VnT, dL, IP)
        v = tl.load(v_ptr + i64 * v_st + en, mask=live, other=0.0).to(tl.float32)
        o = tl.load(o_ptr + out + i64 * (HV * V) + en, mask=live, other=0.0).to(tl.float32)
        dof = do.to(tl.float32)
        Yf = Y.to(tl.float32)
        Vf = Vn.to(tl.float32)
        q_dq += tl.sum(o * dof, axis=1)
        a_d += tl.sum(dof * Vf, axis=1)
        y_vn += tl.sum(Yf * Vf, axis=1)
        y_v += tl.sum(Yf * v, axis=1)
        tl.store(dv_ptr + out + i64 * (HV * V) + en, (Yf * beta[:, None]).to(DT), mask=live)
    rp = row_ptr + tile * 512 + ii
    tl.store(rp + 192, q_dq)
    tl.store(rp + 256, 2.0 * y_vn - beta * y_v)
    tl.store(rp + 320, a_d * scale)
    tl.store(db_ptr + (b64 * T + r64 + ii) * HV + hv, ((1.0 - beta) * y_vn).to(db_ptr.dtype.element_ty), mask=ii < n)
    I = ii[:, None]
    J = ii[None, :]
    block = tl.where(I < 32, 0, tl.where(J < 32, 2, 1))
    bo = tile * 3072 + block * 1024 + (I % 32) * 32 + J % 32
    keep = (I >= 32) | (J < 32)
    tl.store(dA_ptr + bo, tl.where(I > J, dA * scale, 0.0).to(DT), mask=keep)
    tl.store(dL_ptr + bo, tl.where(I > J, dL * -beta[:, None], 0.0).to(DT), mask=keep)
    for k0 in tl.static_range(0, K, BK):
        d = k0 + tl.arange(0, BK)
        p0 = tl.zeros((64, BK), tl.float32)
        p1 = tl.zeros((64, BK), tl.float32)
        p2 = tl.zeros((64, BK), tl.float32)
        w = tl.zeros((BK,), tl.float32)
        for v0 in tl.static_range(0, V, BV):
            e = v0 + tl.arange(0, BV)
            en = e[None, :]
            ho = tile * (V * K) + e[:, None] * K + d[None, :]
            h = tl.load(h_ptr + ho)
            dS = tl.load(dS_ptr + ho)
            if V > BV:
                do = tl.load(do_ptr + i64 * do_st + en, mask=live, other=0.0)
                Y = tl.load(Y_ptr + tile * (64 * V) + ii[:, None] * V + en)
                Vn = tl.load(vn_ptr + tile * (64 * V) + ii[:, None] * V + en)
            p0 = dot(do, h, p0, IP)
            p1 = dot(Y, h, p1, IP)
            p2 = dot(Vn, dS, p2, IP)
            w += tl.sum(h.to(tl.float32) * dS.to(tl.float32), axis=0)
        po = P_ptr + tile * (192 * K) + ii[:, None] * K + d[None, :]
        tl.store(po, (p0 * scale).to(DT))
        tl.store(po + 64 * K, (p1 * -beta[:, None]).to(DT))
        tl.store(po + 128 * K, p2.to(DT))
        tl.store(w_ptr + tile * K + d, w * tl.load(gam_ptr + tile * K + d))
