"""Stage 1 of the forward pass, parallel over chunks: everything that does not need the state.

Per chunk and value head (G = inclusive cumulative log decay inside the chunk, q and k L2-normalised, s = scale):
  Q+ = s q e^G     K+ = k e^G     Kb = k e^(G_C - G)     Gam = e^(G_C)
  A_ij = s sum_d q_i k_j e^(G_i - G_j)   (j <= i)          L_ij = beta_i sum_d k_i k_j e^(G_i - G_j)   (j < i)
  M = (I + L)^-1 by block doubling: every intermediate is itself an inverse, so that fp16 holds it (a Neumann product
  does not).

The chunk is two halves of 32 tokens.  Two warps own 16 rows of a half each: the left operand of every product is then
the accumulator layout itself and stays in registers, only right operands pass through shared memory.
"""

import triton
import triton.language as tl

from .common import anchored, block_start, chunk_rows, decay_rate, dot, log2_decay, map_rows, sigmoid, split


@triton.jit
def _norms(x_ptr, st, r, live, K: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of 32 rows; x_ptr points at channel 0 of the first row."""
    BN: tl.constexpr = K if K < 128 else 128
    s = tl.zeros((32,), tl.float32)
    for k0 in tl.static_range(0, K, BN):
        d = k0 + tl.arange(0, BN)
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * st + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        s += tl.sum(x * x, axis=1)
    return 1.0 / tl.sqrt(s + 1e-6)


@triton.jit
def _gate(z_ptr, st, bias, rate, bound, r, live, d, BOUNDED: tl.constexpr):
    z = tl.load(z_ptr + r.to(tl.int64)[:, None] * st + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    return tl.where(live[:, None], log2_decay(z + bias[None, :], rate, bound, BOUNDED), 0.0)


@triton.jit
def _diagonal(q, k, G, hi, lo, A, L, I, J, BS: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """Adds this slice's q k^T and k k^T of one half to A and L.  Entries outside the causal blocks are garbage
    (possibly inf) for BS = 32 and are masked by the caller; for smaller blocks every level masks its own."""
    D = map_rows(anchored(I, J, BS), hi, lo, IP)
    kk = tl.trans((k * tl.exp2(-D)).to(DT))
    up = tl.exp2(D)
    if BS == 32:
        A = dot((q * up).to(DT), kk, A, IP)
        L = dot((k * up).to(DT), kk, L, IP)
    else:
        same = block_start(I, BS) == block_start(J, BS)
        low = same & (I >= J)
        A += tl.where(low, tl.dot((q * up).to(DT), kk, input_precision=IP), 0.0)
        L += tl.where(low, tl.dot((k * up).to(DT), kk, input_precision=IP), 0.0)
        A, L = _level(q, k, hi, lo, A, L, I, J, 16, DT, IP)
        if BS == 8:
            A, L = _level(q, k, hi, lo, A, L, I, J, 8, DT, IP)
    return A, L


@triton.jit
def _level(q, k, hi, lo, A, L, I, J, W: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """Pairs whose query lies in the second and key in the first W tokens of a block of 2W."""
    x = tl.exp2(-tl.abs(map_rows(anchored(I, J, 2 * W), hi, lo, IP)))
    kk = tl.trans((k * x).to(DT))
    pair = (block_start(I, 2 * W) == block_start(J, 2 * W)) & (I % (2 * W) >= W) & (J % (2 * W) < W)
    A += tl.where(pair, tl.dot((q * x).to(DT), kk, input_precision=IP), 0.0)
    L += tl.where(pair, tl.dot((k * x).to(DT), kk, input_precision=IP), 0.0)
    return A, L


@triton.jit
def _inverse(L, I, J, HT: tl.constexpr, IP: tl.constexpr):
    """(I + L)^-1 of a strictly lower 32 x 32 L."""
    M = tl.where(I == J, 1.0, 0.0) - tl.where(block_start(I, 2) == block_start(J, 2), L, 0.0)
    for lg in tl.static_range(1, 5):
        pair = ((I >> (lg + 1)) == (J >> (lg + 1))) & ((I >> lg) > (J >> lg))
        Lm = tl.where(pair, L, 0.0).to(HT)
        Mh = M.to(HT)
        M -= tl.dot(tl.dot(Mh, Lm, input_precision=IP).to(HT), Mh, input_precision=IP)
    return M


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def prep_kernel(
    q_ptr,
    k_ptr,
    z_ptr,
    beta_ptr,
    A_log_ptr,
    bias_ptr,
    table_ptr,
    Qp_ptr,
    Kp_ptr,
    Kb_ptr,
    A_ptr,
    M_ptr,
    gam_ptr,
    row_ptr,
    q_sb,
    q_st,
    q_sh,
    k_sb,
    k_st,
    k_sh,
    z_sb,
    z_st,
    z_sh,
    b_sb,
    b_st,
    b_sh,
    T,
    NT,
    HV,
    scale,
    bound,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    BOUNDED: tl.constexpr,
    VARLEN: tl.constexpr,
    DT: tl.constexpr,
    HT: tl.constexpr,
    IP: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    cg = pid // HV
    b, row0, n = chunk_rows(table_ptr, cg, T, NT, VARLEN)
    if n <= 0:
        return
    tile = tl.cast(pid, tl.int64)
    h = hv // GROUP
    b64 = tl.cast(b, tl.int64)
    r64 = tl.cast(row0, tl.int64)
    q_ptr += b64 * q_sb + r64 * q_st + tl.cast(h, tl.int64) * q_sh
    k_ptr += b64 * k_sb + r64 * k_st + tl.cast(h, tl.int64) * k_sh
    z_ptr += b64 * z_sb + r64 * z_st + tl.cast(hv, tl.int64) * z_sh
    beta_ptr += b64 * b_sb + r64 * b_st + tl.cast(hv, tl.int64) * b_sh
    r0 = tl.arange(0, 32)
    r1 = 32 + r0
    live0 = r0 < n
    live1 = r1 < n
    rate = decay_rate(tl.load(A_log_ptr + hv).to(tl.float32))

    rq0 = _norms(q_ptr, q_st, r0, live0, K)
    rq1 = _norms(q_ptr, q_st, r1, live1, K)
    rk0 = _norms(k_ptr, k_st, r0, live0, K)
    rk1 = _norms(k_ptr, k_st, r1, live1, K)
    beta0 = tl.where(
        live0, sigmoid(tl.load(beta_ptr + r0.to(tl.int64) * b_st, mask=live0, other=0.0).to(tl.float32)), 0.0
    )
    beta1 = tl.where(
        live1, sigmoid(tl.load(beta_ptr + r1.to(tl.int64) * b_st, mask=live1, other=0.0).to(tl.float32)), 0.0
    )
    rp = row_ptr + tile * 512
    tl.store(rp + r0, beta0)
    tl.store(rp + r1, beta1)
    tl.store(rp + 64 + r0, rq0)
    tl.store(rp + 64 + r1, rq1)
    tl.store(rp + 128 + r0, rk0)
    tl.store(rp + 128 + r1, rk1)
    rq0 = rq0 * scale
    rq1 = rq1 * scale

    I = r0[:, None]
    J = r0[None, :]
    A00 = tl.zeros((32, 32), tl.float32)
    A10 = tl.zeros((32, 32), tl.float32)
    A11 = tl.zeros((32, 32), tl.float32)
    L00 = tl.zeros((32, 32), tl.float32)
    L10 = tl.zeros((32, 32), tl.float32)
    L11 = tl.zeros((32, 32), tl.float32)
    for k0 in tl.range(0, K, BD, num_stages=1):
        d = k0 + tl.arange(0, BD)
        dn = d[None, :]
        bias = tl.load(bias_ptr + hv * K + d).to(tl.float32)
        hi0, lo0 = split(_gate(z_ptr, z_st, bias, rate, bound, r0, live0, d, BOUNDED), HT)
        hi1, lo1 = split(_gate(z_ptr, z_st, bias, rate, bound, r1, live1, d, BOUNDED), HT)
        one = tl.where(J >= 0, 1.0, 0.0)
        tri = tl.where(J <= I, 1.0, 0.0)
        end0 = map_rows(one + I * 0, hi0, lo0, IP)
        end1 = map_rows(one + I * 0, hi1, lo1, IP)
        qo0 = r0.to(tl.int64)[:, None] * q_st + dn
        qo1 = r1.to(tl.int64)[:, None] * q_st + dn
        ko0 = r0.to(tl.int64)[:, None] * k_st + dn
        ko1 = r1.to(tl.int64)[:, None] * k_st + dn
        so = tile * (64 * K) + I * K + dn
        # first half
        G = map_rows(tri, hi0, lo0, IP)
        k = tl.load(k_ptr + ko0, mask=live0[:, None], other=0.0).to(tl.float32) * rk0[:, None]
        q = tl.load(q_ptr + qo0, mask=live0[:, None], other=0.0).to(tl.float32) * rq0[:, None]
        A00, L00 = _diagonal(q, k, G, hi0, lo0, A00, L00, I, J, BS, DT, IP)
        up = tl.exp2(G)
        tl.store(Qp_ptr + so, (q * up).to(DT))
        tl.store(Kp_ptr + so, (k * up).to(DT))
        tl.store(Kb_ptr + so, (k * tl.exp2(end0 - G + end1)).to(DT))
        kE = tl.trans((k * tl.exp2(end0 - G)).to(DT))
        # second half, and its pairs with the first
        G = map_rows(tri, hi1, lo1, IP)
        k = tl.load(k_ptr + ko1, mask=live1[:, None], other=0.0).to(tl.float32) * rk1[:, None]
        q = tl.load(q_ptr + qo1, mask=live1[:, None], other=0.0).to(tl.float32) * rq1[:, None]
        A11, L11 = _diagonal(q, k, G, hi1, lo1, A11, L11, I, J, BS, DT, IP)
        up = tl.exp2(G)
        A10 = dot((q * up).to(DT), kE, A10, IP)
        L10 = dot((k * up).to(DT), kE, L10, IP)
        up = tl.exp2(G + end0)
        so += 32 * K
        tl.store(Qp_ptr + so, (q * up).to(DT))
        tl.store(Kp_ptr + so, (k * up).to(DT))
        tl.store(Kb_ptr + so, (k * tl.exp2(end1 - G)).to(DT))
        tl.store(gam_ptr + tile * K + dn + I * 0, tl.exp2(end0 + end1), mask=(I + dn * 0) == 0)

    zero = tl.zeros((32, 32), tl.float32).to(DT)
    so = tile * 4096 + I * 64 + J
    tl.store(A_ptr + so, tl.where(I >= J, A00, 0.0).to(DT))
    tl.store(A_ptr + so + 32, zero)
    tl.store(A_ptr + so + 2048, A10.to(DT))
    tl.store(A_ptr + so + 2080, tl.where(I >= J, A11, 0.0).to(DT))
    M0 = _inverse(tl.where(I > J, L00, 0.0) * beta0[:, None], I, J, HT, IP)
    M1 = _inverse(tl.where(I > J, L11, 0.0) * beta1[:, None], I, J, HT, IP)
    t = tl.dot((L10 * beta1[:, None]).to(HT), M0.to(HT), input_precision=IP)
    M10 = tl.dot(M1.to(HT), t.to(HT), input_precision=IP)
    tl.store(M_ptr + so, M0.to(DT))
    tl.store(M_ptr + so + 32, zero)
    tl.store(M_ptr + so + 2048, (-M10).to(DT))
    tl.store(M_ptr + so + 2080, M1.to(DT))
