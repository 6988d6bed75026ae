"""Stage 2 of the forward pass: the state, serial over a document's chunks, parallel over (document, head, V slice).

  V' = M b (V - K+ S)      O = Q+ S + A V'      S <- diag(Gam) S + Kb^T V'

The state is kept transposed, S^T [BV, K] in fp32 registers: every left operand (S, X, V') is then an accumulator and
every right operand a loaded tile, so that nothing bounces through shared memory between two products of the chain.
Left operands in registers are what ptxas before 13.3 may reuse too early (asynchronous wgmma); the device tests
therefore compare repeated runs bit by bit for every configuration that the launcher can choose.
"""

import triton
import triton.language as tl

from .common import dot


@triton.jit
def document(doc_ptr, seg, T, NT, VARLEN: tl.constexpr):
    """(sequence of the batch, first chunk, chunks, first row, end row) of document seg."""
    if VARLEN:
        p = doc_ptr + seg * 4
        return 0, tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
    else:
        return seg, seg * NT, NT, 0, T


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def state_kernel(
    v_ptr,
    doc_ptr,
    Qp_ptr,
    Kp_ptr,
    Kb_ptr,
    A_ptr,
    M_ptr,
    gam_ptr,
    row_ptr,
    S0_ptr,
    o_ptr,
    h_ptr,
    vn_ptr,
    ST_ptr,
    v_sb,
    v_st,
    v_sh,
    T,
    NT,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HAS_S0: tl.constexpr,
    SAVE: tl.constexpr,
    FINAL: tl.constexpr,
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
    if HAS_S0:
        S = tl.load(S0_ptr + sp).to(tl.float32)
    else:
        S = tl.zeros((BV, K), tl.float32)
    tile = tl.cast(cg0, tl.int64) * HV + hv
    kp = tile * (64 * K) + ii[:, None] * K + d[None, :]
    ap = tile * 4096 + ii[:, None] * 64 + ii[None, :]
    hp = h_ptr + tile * (V * K) + vv[:, None] * K + d[None, :]
    np_ = vn_ptr + tile * (64 * V) + ii[:, None] * V + vv[None, :]
    gp = gam_ptr + tile * K + d
    bp = row_ptr + tile * 512 + ii
    b64 = tl.cast(b, tl.int64)
    v_ptr += b64 * v_sb + tl.cast(row0, tl.int64) * v_st + tl.cast(hv, tl.int64) * v_sh
    o_ptr += ((b64 * T + row0) * HV + hv) * V
    ost = HV * V
    for c in tl.range(0, chunks, num_stages=NS):
        Kp = tl.load(Kp_ptr + kp)
        M = tl.load(M_ptr + ap)
        Qp = tl.load(Qp_ptr + kp)
        A = tl.load(A_ptr + ap)
        Kb = tl.load(Kb_ptr + kp)
        gam = tl.load(gp)
        beta = tl.load(bp)
        row = tl.cast(c, tl.int64) * 64 + ii
        live = (row < end - row0)[:, None]
        v = tl.load(v_ptr + row[:, None] * v_st + vv[None, :], mask=live, other=0.0)
        Sb = S.to(DT)
        if SAVE:
            tl.store(hp, Sb)
        X = (tl.trans(v).to(tl.float32) - tl.dot(Sb, tl.trans(Kp), input_precision=IP)) * beta[None, :]
        O = tl.dot(Sb, tl.trans(Qp), input_precision=IP)
        Vn = tl.dot(X.to(DT), tl.trans(M), input_precision=IP).to(DT)
        S = dot(Vn, Kb, S * gam[None, :], IP)
        O = dot(Vn, tl.trans(A), O, IP)
        if SAVE:
            tl.store(np_, tl.trans(Vn))
        tl.store(o_ptr + row[:, None] * ost + vv[None, :], tl.trans(O.to(DT)), mask=live)
        kp += HV * (64 * K)
        ap += HV * 4096
        hp += HV * (V * K)
        np_ += HV * (64 * V)
        gp += HV * K
        bp += HV * 512
    if FINAL:
        tl.store(ST_ptr + sp, S)
