"""Stage 3 of the backward pass, parallel over (chunk, slice of key channels): dq, dk, dz and the partial sums of dA_log, dt_bias.

Every tensor is [BD channels, 32 tokens] of one half of the chunk.  A warp owns 16 channels and all tokens, so cumulative sums
and in-chunk products (contractions over tokens) never leave the warp: left operands are accumulators as they lie, right
operands are the small matrices dA, dL that all channels share.  No reduction over channels is left (see vside.py), so that the
slices of a chunk are independent programs.

The gate's gradient pairs exactly: the query side and the key side of a pair (i, j) are formed from the same rounded operands,
  dG_i += qh_i . (a kh)_i        dG_j -= kh_j . (a^T qh)_j
so that the reverse cumulative sum cancels them to fp32 rounding with single-pass bf16 products.  The diagonal pair i = j
carries no gate gradient and never enters the products.
"""

import triton
import triton.language as tl

from .common import anchored, block_start, chunk_rows, decay_rate, gate_gradient, log2_decay, map_cols, split


@triton.jit
def _pairs(q, bk, k, up, down, a, l, dq, u, dGq, dk, DT: tl.constexpr, IP: tl.constexpr):
    """Adds the products of one causal block: a, l [32 queries, 32 keys]; up, down the decay factors of queries and keys.
    Returns the sums and the key side's share of dG, to be subtracted where the keys live."""
    qh = (q * up).to(DT)
    bh = (bk * up).to(DT)
    kh = (k * down).to(DT)
    t = tl.dot(kh, tl.trans(a), input_precision=IP)
    dq += t * up
    dGq += t * qh.to(tl.float32)
    t = tl.dot(kh, tl.trans(l), input_precision=IP)
    u += t * up
    dGq += t * bh.to(tl.float32)
    t = tl.dot(bh, l, tl.dot(qh, a, input_precision=IP), input_precision=IP)
    return dq, u, dGq, dk + t * down, t * kh.to(tl.float32)


@triton.jit
def _half(q, bk, k, hi, lo, a, l, dq, u, dk, dG, I, J, BS: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """All pairs inside one half: the middle-anchored blocks, then the dyadic levels between blocks.  Of a, l, I runs over
    queries and J over keys; of the token maps, I over the summed token and J over the result."""
    D = map_cols(hi, lo, anchored(J, I, BS), IP)
    if BS == 32:
        dq, u, dG, dk, x = _pairs(q, bk, k, tl.exp2(D), tl.exp2(-D), a, l, dq, u, dG, dk, DT, IP)
        dG -= x
    else:
        same = block_start(I, BS) == block_start(J, BS)
        dq, u, dG, dk, x = _pairs(q, bk, k, tl.exp2(D), tl.exp2(-D), tl.where(same, a, 0.0).to(DT),
                                  tl.where(same, l, 0.0).to(DT), dq, u, dG, dk, DT, IP)
        dG -= x
        dq, u, dk, dG = _level(q, bk, k, hi, lo, a, l, dq, u, dk, dG, I, J, 16, DT, IP)
        if BS == 8:
            dq, u, dk, dG = _level(q, bk, k, hi, lo, a, l, dq, u, dk, dG, I, J, 8, DT, IP)
    return dq, u, dk, dG


@triton.jit
def _level(q, bk, k, hi, lo, a, l, dq, u, dk, dG, I, J, W: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """Pairs whose query lies in the second and key in the first W tokens of a block of 2W."""
    x = tl.exp2(-tl.abs(map_cols(hi, lo, anchored(J, I, 2 * W), IP)))
    pair = (block_start(I, 2 * W) == block_start(J, 2 * W)) & (I % (2 * W) >= W) & (J % (2 * W) < W)
    dq, u, dG, dk, y = _pairs(q, bk, k, x, x, tl.where(pair, a, 0.0).to(DT), tl.where(pair, l, 0.0).to(DT),
                              dq, u, dG, dk, DT, IP)
    return dq, u, dk, dG - y


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def kside_kernel(q_ptr, k_ptr, z_ptr, A_log_ptr, bias_ptr, table_ptr, P_ptr, w_ptr, dA_ptr, dL_ptr, row_ptr,
                 dq_ptr, dk_ptr, dz_ptr, pA_ptr, pb_ptr,
                 q_sb, q_st, q_sh, k_sb, k_st, k_sh, z_sb, z_st, z_sh, T, NT, HV, scale, bound,
                 GROUP: tl.constexpr, K: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BOUNDED: tl.constexpr,
                 VARLEN: tl.constexpr, DT: tl.constexpr, HT: tl.constexpr, IP: tl.constexpr):
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
        tl.store(pA_ptr + tile * NK + ik, 0.0)
        return
    h = hv // GROUP
    b64 = tl.cast(b, tl.int64)
    r64 = tl.cast(row0, tl.int64)
    q_ptr += b64 * q_sb + r64 * q_st + tl.cast(h, tl.int64) * q_sh
    k_ptr += b64 * k_sb + r64 * k_st + tl.cast(h, tl.int64) * k_sh
    z_ptr += b64 * z_sb + r64 * z_st + tl.cast(hv, tl.int64) * z_sh
    out = ((b64 * T + r64) * HV + hv) * K
    t0 = tl.arange(0, 32)
    t1 = 32 + t0
    live0 = (t0 < n)[None, :]
    live1 = (t1 < n)[None, :]
    c0 = t0.to(tl.int64)[None, :]
    c1 = c0 + 32
    I = t0[:, None]
    J = t0[None, :]
    rate = decay_rate(tl.load(A_log_ptr + hv).to(tl.float32))
    bias = tl.load(bias_ptr + hv * K + d).to(tl.float32)[:, None]
    w = tl.load(w_ptr + tile * K + d)
    rp = row_ptr + tile * 512

    # gates of both halves
    x0 = tl.load(z_ptr + c0 * z_st + dn, mask=live0, other=0.0).to(tl.float32) + bias
    x1 = tl.load(z_ptr + c1 * z_st + dn, mask=live1, other=0.0).to(tl.float32) + bias
    g0 = tl.where(live0, log2_decay(x0, rate, bound, BOUNDED), 0.0)
    g1 = tl.where(live1, log2_decay(x1, rate, bound, BOUNDED), 0.0)
    end0 = tl.sum(g0, axis=1)[:, None]
    end1 = tl.sum(g1, axis=1)[:, None]
    hi0, lo0 = split(g0, HT)
    hi1, lo1 = split(g1, HT)
    tri = tl.where(I <= J, 1.0, 0.0)

    # state terms: P holds S dO^T, S Y^T, dS V'^T
    pp = P_ptr + tile * (192 * K) + dn * 64 + J
    beta0 = tl.load(rp + t0)[None, :]
    beta1 = tl.load(rp + t1)[None, :]
    q0 = tl.load(q_ptr + c0 * q_st + dn, mask=live0, other=0.0).to(tl.float32) * tl.load(rp + 64 + t0)[None, :]
    k0 = tl.load(k_ptr + c0 * k_st + dn, mask=live0, other=0.0).to(tl.float32) * tl.load(rp + 128 + t0)[None, :]
    G = map_cols(hi0, lo0, tri, IP)
    up = tl.exp2(G)
    down0 = tl.exp2(end0 - G)
    bk0 = k0 * beta0
    dq0 = tl.load(pp).to(tl.float32) * (up * scale)
    u0 = tl.load(pp + 64 * K).to(tl.float32) * -up
    dk0 = tl.load(pp + 128 * K).to(tl.float32) * (down0 * tl.exp2(end1))
    kd0 = k0 * dk0
    dG0 = q0 * dq0 + bk0 * u0

    q1 = tl.load(q_ptr + c1 * q_st + dn, mask=live1, other=0.0).to(tl.float32) * tl.load(rp + 64 + t1)[None, :]
    k1 = tl.load(k_ptr + c1 * k_st + dn, mask=live1, other=0.0).to(tl.float32) * tl.load(rp + 128 + t1)[None, :]
    G = map_cols(hi1, lo1, tri, IP)
    up1 = tl.exp2(G)
    up = up1 * tl.exp2(end0)
    bk1 = k1 * beta1
    dq1 = tl.load(pp + 32).to(tl.float32) * (up * scale)
    u1 = tl.load(pp + 64 * K + 32).to(tl.float32) * -up
    dk1 = tl.load(pp + 128 * K + 32).to(tl.float32) * tl.exp2(end1 - G)
    kd1 = k1 * dk1
    dG1 = q1 * dq1 + bk1 * u1

    # pairs of the second half with the first, then inside each half
    mo = tile * 3072 + I * 32 + J
    dq1, u1, dG1, dk0, y = _pairs(q1, bk1, k0, up1, down0, tl.load(dA_ptr + mo + 2048), tl.load(dL_ptr + mo + 2048),
                                  dq1, u1, dG1, dk0, DT, IP)
    dG0 -= y
    dq1, u1, dk1, dG1 = _half(q1, bk1, k1, hi1, lo1, tl.load(dA_ptr + mo + 1024), tl.load(dL_ptr + mo + 1024),
                              dq1, u1, dk1, dG1, I, J, BS, DT, IP)
    a_d = tl.load(rp + 320 + t1)[None, :]
    dk1 += u1 * beta1 + a_d * q1
    dq1 += a_d * k1
    do = out + c1 * (HV * K) + dn
    tl.store(dq_ptr + do, ((dq1 - q1 * tl.load(rp + 192 + t1)[None, :]) * tl.load(rp + 64 + t1)[None, :]).to(dq_ptr.dtype.element_ty), mask=live1)
    tl.store(dk_ptr + do, ((dk1 - k1 * tl.load(rp + 256 + t1)[None, :]) * tl.load(rp + 128 + t1)[None, :]).to(dk_ptr.dtype.element_ty), mask=live1)
    dq0, u0, dk0, dG0 = _half(q0, bk0, k0, hi0, lo0, tl.load(dA_ptr + mo), tl.load(dL_ptr + mo),
                              dq0, u0, dk0, dG0, I, J, BS, DT, IP)
    a_d = tl.load(rp + 320 + t0)[None, :]
    dk0 += u0 * beta0 + a_d * q0
    dq0 += a_d * k0
    do = out + c0 * (HV * K) + dn
    tl.store(dq_ptr + do, ((dq0 - q0 * tl.load(rp + 192 + t0)[None, :]) * tl.load(rp + 64 + t0)[None, :]).to(dq_ptr.dtype.element_ty), mask=live0)
    tl.store(dk_ptr + do, ((dk0 - k0 * tl.load(rp + 256 + t0)[None, :]) * tl.load(rp + 128 + t0)[None, :]).to(dk_ptr.dtype.element_ty), mask=live0)

    # dg_i = sum_{j >= i} dG_j + sum_{j < i} (k . dk3)_j + W; both sums run over the whole chunk
    suffix = tl.where(I >= J, 1.0, 0.0)
    prefix = tl.where(I < J, 1.0, 0.0)
    hi, lo = split(dG1, DT)
    ki, kl = split(kd1, DT)
    dg = map_cols(hi, lo, suffix, IP) + map_cols(ki, kl, prefix, IP) + (w + tl.sum(kd0, axis=1))[:, None]
    dz, dA = gate_gradient(dg, x1, rate, bound, BOUNDED)
    dz = tl.where(live1, dz, 0.0)
    tl.store(dz_ptr + out + c1 * (HV * K) + dn, dz.to(dz_ptr.dtype.element_ty), mask=live1)
    pb = tl.sum(dz, axis=1)
    pA = tl.sum(tl.where(live1, dA, 0.0), axis=1)
    hi, lo = split(dG0, DT)
    ki, kl = split(kd0, DT)
    dg = map_cols(hi, lo, suffix, IP) + map_cols(ki, kl, prefix, IP) + (w + tl.sum(dG1, axis=1))[:, None]
    dz, dA = gate_gradient(dg, x0, rate, bound, BOUNDED)
    dz = tl.where(live0, dz, 0.0)
    tl.store(dz_ptr + out + c0 * (HV * K) + dn, dz.to(dz_ptr.dtype.element_ty), mask=live0)
    tl.store(pb_ptr + tile * K + d, pb + tl.sum(dz, axis=1))
    tl.store(pA_ptr + tile * NK + ik, tl.sum(pA + tl.sum(tl.where(live0, dA, 0.0), axis=1), axis=0))
