"""Stage 3 of the backward pass, parallel over (chunk, slice of key channels): dq, dk, dz, parts of dA_log, dt_bias.

Every tensor is [BD channels, 32 tokens] of one half of the chunk.  A warp owns 16 channels and all tokens, so that
cumulative sums and in-chunk products (contractions over tokens) never leave the warp: left operands are accumulators as
they lie, right operands are the small matrices dA, dL that all channels share.  No reduction over channels is left (see
vside.py), so that the slices of a chunk are independent programs.

The gate's gradient pairs exactly: both sides of a pair (i, j) are formed from the same rounded operands,
  dG_i += qh_i . (a kh)_i        dG_j -= kh_j . (a^T qh)_j
so that the reverse cumulative sum cancels them to fp32 rounding with single-pass bf16 products.  The pair i = j
carries no gate gradient and never enters the products.
"""

import triton
import triton.language as tl

from .common import anchored, block_start, chunk_rows, decay_rate, gate_gradient, log2_decay, map_cols, split


@triton.jit
def _pairs(q, k, kh, up, a, l, dq, dk, dG, DT: tl.constexpr, IP: tl.constexpr):
    """Products of one causal block.  a, l [32 queries, 32 keys]; up [BD, queries] the queries' decay factors; kh the
    keys with theirs.  Adds the query side to dq, dk, dG; returns also the key side's sum, without its decay factor."""
    qh = (q * up).to(DT)
    bh = (k * up).to(DT)
    t = tl.dot(kh, tl.trans(a), input_precision=IP)
    dq += t * up
    dG += t * qh.to(tl.float32)
    t = tl.dot(kh, tl.trans(l), input_precision=IP)
    dk += t * up
    dG += t * bh.to(tl.float32)
    return dq, dk, dG, tl.dot(bh, l, tl.dot(qh, a, input_precision=IP), input_precision=IP)


@triton.jit
def _block(q, k, up, down, a, l, dq, dk, dG, DT: tl.constexpr, IP: tl.constexpr):
    """A block whose queries and keys are the same 32 tokens: both sides of every pair."""
    kh = (k * down).to(DT)
    dq, dk, dG, t = _pairs(q, k, kh, up, a, l, dq, dk, dG, DT, IP)
    return dq, dk + t * down, dG - t * kh.to(tl.float32)


@triton.jit
def _level(q, k, hi, lo, a, l, dq, dk, dG, I, J, W: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """Pairs whose query lies in the second and key in the first W tokens of a block of 2W.  Of a, l, I runs over
    queries and J over keys; of a token map, I over the summed token and J over the result."""
    x = tl.exp2(-tl.abs(map_cols(hi, lo, anchored(J, I, 2 * W), IP)))
    pair = (block_start(I, 2 * W) == block_start(J, 2 * W)) & (I % (2 * W) >= W) & (J % (2 * W) < W)
    return _block(q, k, x, x, tl.where(pair, a, 0.0).to(DT), tl.where(pair, l, 0.0).to(DT), dq, dk, dG, DT, IP)


@triton.jit
def _decay(
    z_ptr,
    zo,
    bias,
    live,
    rate,
    bound,
    I,
    J,
    BS: tl.constexpr,
    BOUNDED: tl.constexpr,
    HT: tl.constexpr,
    IP: tl.constexpr,
):
    """Of one half: block factors (up, down), factors from the half's start and to its end, log2 decay of the half, and
    the log2 decays in two terms."""
    x = tl.load(z_ptr + zo, mask=live, other=0.0).to(tl.float32) + bias
    g = tl.where(live, log2_decay(x, rate, bound, BOUNDED), 0.0)
    end = tl.sum(g, axis=1)[:, None]
    hi, lo = split(g, HT)
    D = map_cols(hi, lo, anchored(J, I, BS), IP)
    up = tl.exp2(D)
    down = tl.exp2(-D)
    if BS == 32:
        mid = tl.sum(tl.where(J < 16, g, 0.0), axis=1)[:, None]
        first = up * tl.exp2(mid)
        last = down * tl.exp2(end - mid)
    else:
        G = map_cols(hi, lo, tl.where(I <= J, 1.0, 0.0), IP)
        first = tl.exp2(G)
        last = tl.exp2(end - G)
    return up, down, first, last, end, hi, lo


@triton.jit
def _half(
    q_ptr,
    qo,
    k_ptr,
    ko,
    z_ptr,
    zo,
    pp,
    rp,
    dq_ptr,
    dk_ptr,
    dz_ptr,
    oo,
    a,
    l,
    ax,
    lx,
    kx,
    tx,
    before,
    after,
    carry,
    bias,
    live,
    rate,
    bound,
    I,
    J,
    K: tl.constexpr,
    SECOND: tl.constexpr,
    BS: tl.constexpr,
    BOUNDED: tl.constexpr,
    DT: tl.constexpr,
    HT: tl.constexpr,
    IP: tl.constexpr,
):
    """One half of the chunk: stores its dq, dk, dz.

    a, l: the half's own block.  ax, lx: the block of second-half queries and first-half keys; kx [BD, 32] the first
    half's decayed keys (read by the second half), tx the key side of that block (read by the first half).
    before, after: log2 decay of the chunk before and after this half.  carry [BD, 1]: what dg of every token here
    receives from outside the half.  Values needed at both ends of the pass are loaded again: registers are short.
    """
    up, down, first, last, end, ghi, glo = _decay(z_ptr, zo, bias, live, rate, bound, I, J, BS, BOUNDED, HT, IP)
    q = tl.load(q_ptr + qo, mask=live, other=0.0).to(tl.float32) * tl.load(rp + 64 + J)
    k = tl.load(k_ptr + ko, mask=live, other=0.0).to(tl.float32) * tl.load(rp + 128 + J)
    pre = tl.exp2(before)
    dk = tl.load(pp + 128 * K).to(tl.float32) * last * tl.exp2(after)
    kd = k * dk
    sum_kd = tl.sum(kd, axis=1)[:, None]
    hi, lo = split(kd, DT)
    dg = map_cols(hi, lo, tl.where(I < J, 1.0, 0.0), IP) + carry  # keys before i: a prefix sum, no cancellation
    t = tl.load(pp + 64 * K).to(tl.float32) * (first * pre)
    dk += t
    dG = k * t
    dq = tl.load(pp).to(tl.float32) * (first * pre)
    dG += q * dq
    if SECOND:
        dq, dk, dG, tx = _pairs(q, k, kx, first, ax, lx, dq, dk, dG, DT, IP)
    else:
        dk += tx * last
        dG -= tx * (k * last).to(DT).to(tl.float32)
    if BS == 32:
        dq, dk, dG = _block(q, k, up, down, a, l, dq, dk, dG, DT, IP)
    else:
        same = block_start(I, BS) == block_start(J, BS)
        dq, dk, dG = _block(
            q, k, up, down, tl.where(same, a, 0.0).to(DT), tl.where(same, l, 0.0).to(DT), dq, dk, dG, DT, IP
        )
        dq, dk, dG = _level(q, k, ghi, glo, a, l, dq, dk, dG, I, J, 16, DT, IP)
        if BS == 8:
            dq, dk, dG = _level(q, k, ghi, glo, a, l, dq, dk, dG, I, J, 8, DT, IP)
    a_d = tl.load(rp + 320 + J)
    gq = (dq + a_d * k - q * tl.load(rp + 192 + J)) * tl.load(rp + 64 + J)
    gk = (dk + a_d * q - k * tl.load(rp + 256 + J)) * tl.load(rp + 128 + J)
    tl.store(dq_ptr + oo, gq.to(dq_ptr.dtype.element_ty), mask=live)
    tl.store(dk_ptr + oo, gk.to(dk_ptr.dtype.element_ty), mask=live)
    hi, lo = split(dG, DT)
    dg += map_cols(hi, lo, tl.where(I >= J, 1.0, 0.0), IP)
    x = tl.load(z_ptr + zo, mask=live, other=0.0).to(tl.float32) + bias
    dz, dA = gate_gradient(dg, x, rate, bound, BOUNDED)
    dz = tl.where(live, dz, 0.0)
    tl.store(dz_ptr + oo, dz.to(dz_ptr.dtype.element_ty), mask=live)
    return tx, sum_kd, tl.sum(dG, axis=1)[:, None], tl.sum(dz, axis=1), tl.sum(tl.where(live, dA, 0.0), axis=1)


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def kside_kernel(
    q_ptr,
    k_ptr,
    z_ptr,
    A_log_ptr,
    bias_ptr,
    table_ptr,
    P_ptr,
    w_ptr,
    dA_ptr,
    dL_ptr,
    row_ptr,
    dq_ptr,
    dk_ptr,
    dz_ptr,
    pA_ptr,
    pb_ptr,
    q_sb,
    q_st,
    q_sh,
    k_sb,
    k_st,
    k_sh,
    z_sb,
    z_st,
    z_sh,
    T,
    NT,
    HV,
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
    NK: tl.constexpr = K // BD
    pid = tl.program_id(0)
    ik = pid % NK
    hv = (pid // NK) % HV
    cg = pid // (NK * HV)
    b, row0, n = chunk_rows(table_ptr, cg, T, NT, VARLEN)
    tile = tl.cast(cg, tl.int64) * HV + hv
    d = ik * BD + tl.arange(0, BD)
    dn = d[:, None]
    if n <= 0:
        tl.store(pb_ptr + tile * K + d, tl.zeros((BD,), tl.float32))
        tl.store(pA_ptr + tile * K + d, tl.zeros((BD,), tl.float32))
        return
    b64 = tl.cast(b, tl.int64)
    r64 = tl.cast(row0, tl.int64)
    h64 = tl.cast(hv // GROUP, tl.int64)
    q_ptr += b64 * q_sb + r64 * q_st + h64 * q_sh
    k_ptr += b64 * k_sb + r64 * k_st + h64 * k_sh
    z_ptr += b64 * z_sb + r64 * z_st + tl.cast(hv, tl.int64) * z_sh
    out = ((b64 * T + r64) * HV + hv) * K
    dq_ptr += out
    dk_ptr += out
    dz_ptr += out
    t0 = tl.arange(0, 32)
    I = t0[:, None]
    J = t0[None, :]
    live0 = (t0 < n)[None, :]
    live1 = (t0 + 32 < n)[None, :]
    j64 = J.to(tl.int64)
    qo = j64 * q_st + dn
    ko = j64 * k_st + dn
    zo = j64 * z_st + dn
    oo = j64 * (HV * K) + dn
    rate = decay_rate(tl.load(A_log_ptr + hv).to(tl.float32))
    bias = tl.load(bias_ptr + hv * K + dn).to(tl.float32)
    w = tl.load(w_ptr + tile * K + dn)
    rp = row_ptr + tile * 512
    pp = P_ptr + tile * (192 * K) + J * K + dn
    mo = tile * 3072 + I * 32 + J

    # what the second half needs of the first: its decayed keys, and the sums that end in the chunk's total decay
    x1 = tl.load(z_ptr + 32 * z_st + zo, mask=live1, other=0.0).to(tl.float32) + bias
    end1 = tl.sum(tl.where(live1, log2_decay(x1, rate, bound, BOUNDED), 0.0), axis=1)[:, None]
    u0, d0, f0, last0, end0, hi0, lo0 = _decay(z_ptr, zo, bias, live0, rate, bound, I, J, BS, BOUNDED, HT, IP)
    k0 = tl.load(k_ptr + ko, mask=live0, other=0.0).to(tl.float32) * tl.load(rp + 128 + J)
    kx = (k0 * last0).to(DT)
    kd0 = tl.sum(k0 * last0 * tl.load(pp + 128 * K).to(tl.float32), axis=1)[:, None] * tl.exp2(end1)

    ax = tl.load(dA_ptr + mo + 2048)
    lx = tl.load(dL_ptr + mo + 2048)
    zero = tl.zeros((BD, 32), tl.float32)
    none = tl.zeros((BD, 1), tl.float32)
    tx, kd1, sum1, pb, pA = _half(
        q_ptr + 32 * q_st,
        qo,
        k_ptr + 32 * k_st,
        ko,
        z_ptr + 32 * z_st,
        zo,
        pp + 32 * K,
        rp + 32,
        dq_ptr + 32 * HV * K,
        dk_ptr + 32 * HV * K,
        dz_ptr + 32 * HV * K,
        oo,
        tl.load(dA_ptr + mo + 1024),
        tl.load(dL_ptr + mo + 1024),
        ax,
        lx,
        kx,
        zero,
        end0,
        none,
        w + kd0,
        bias,
        live1,
        rate,
        bound,
        I,
        J,
        K,
        True,
        BS,
        BOUNDED,
        DT,
        HT,
        IP,
    )
    tx, kd1, sum0, pb0, pA0 = _half(
        q_ptr,
        qo,
        k_ptr,
        ko,
        z_ptr,
        zo,
        pp,
        rp,
        dq_ptr,
        dk_ptr,
        dz_ptr,
        oo,
        tl.load(dA_ptr + mo),
        tl.load(dL_ptr + mo),
        ax,
        lx,
        kx,
        tx,
        none,
        end1,
        w + sum1,
        bias,
        live0,
        rate,
        bound,
        I,
        J,
        K,
        False,
        BS,
        BOUNDED,
        DT,
        HT,
        IP,
    )
    tl.store(pb_ptr + tile * K + d, pb + pb0)
    tl.store(pA_ptr + tile * K + d, pA + pA0)
