"""`kside.py` with explicit layouts, for K = 128 channels, bf16, bounded gates (32-token blocks).

The plain version is limited by registers and by layout changes through shared memory.  Here every [64 channels, 32 tokens]
tensor lives in one layout, TILE, that is the mma.sync accumulator with its rows renamed (a warp's accumulator rows g and
g + 8 hold channels 2g and 2g + 1).  Loads and stores of 2 channels are 4 bytes wide and fill whole sectors; the change from
TILE to a left operand, and from an accumulator to TILE, is a renaming of registers.  Shared memory holds only dA, dL and the
0/1 matrices of the cumulative sums, written once per program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .hopper import LOG2E, bf16, exp2, fp32, rcp, sigmoid

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
TILE = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [1, 0], [0, 8], [0, 16]],
    lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
    warp_bases=[[16, 0], [32, 0]],
    block_bases=[],
    shape=[64, 32],
))
# TILE with the registers of two neighbouring channels next to each other: what global memory wants; same data per thread.
MEMORY = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[1, 0], [0, 1], [0, 8], [0, 16]],
    lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
    warp_bases=[[16, 0], [32, 0]],
    block_bases=[],
    shape=[64, 32],
))
TOKEN = gl.constexpr(gl.SliceLayout(0, TILE.value))
CHANNEL = gl.constexpr(gl.SliceLayout(1, TILE.value))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=2, max_phase=4, order=[1, 0]))


@gluon.jit
def _left(x):
    y = gl.permute(gl.reshape(x, [4, 8, 2, 32]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(y, [64, 32]), LEFT)


@gluon.jit
def _tile(x):
    y = gl.permute(gl.reshape(x, [4, 2, 8, 32]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(y, [64, 32]), TILE)


@gluon.jit
def _product(a, b):
    return _tile(mma_v2(a, b, gl.full([64, 32], 0.0, gl.float32, ACC)))


@gluon.jit
def _map(x, m, HT: gl.constexpr):
    """x @ m with x in two terms."""
    if HT == gl.bfloat16:
        hi = bf16(x)
        lo = bf16(x - fp32(hi))
    else:
        hi = x.to(HT)
        lo = (x - hi.to(gl.float32)).to(HT)
    acc = mma_v2(_left(lo), m, gl.full([64, 32], 0.0, gl.float32, ACC))
    return _tile(mma_v2(_left(hi), m, acc))


@gluon.jit
def _pairs(q, k, kh, up, beta, a, l, dq, dk, dG):
    """See kside.py; a, l in shared memory, kh a left operand."""
    qh = bf16(q * up)
    t = _product(kh, a.permute([1, 0]).load(RIGHT))
    dq += t * up
    dG += t * fp32(qh)
    bh = bf16(k * (beta * up))
    t = _product(kh, l.permute([1, 0]).load(RIGHT))
    dk += t * (beta * up)
    dG += t * fp32(bh)
    acc = mma_v2(_left(qh), a.load(RIGHT), gl.full([64, 32], 0.0, gl.float32, ACC))
    return dq, dk, dG, _tile(mma_v2(_left(bh), l.load(RIGHT), acc))


@gluon.jit
def _factors(g, anchor):
    """Queries' factor of the block (its reciprocal is the keys'), and per channel: the factors that turn them into those
    from the half's start and to the half's end, and the half's log2 decay."""
    j = gl.expand_dims(gl.arange(0, 32, TOKEN), 0)
    up = exp2(_map(g, anchor, gl.float16))
    end = gl.expand_dims(gl.sum(g, axis=1), 1)
    mid = gl.expand_dims(gl.sum(gl.where(j < 16, g, 0.0), axis=1), 1)
    return up, exp2(mid), exp2(end - mid), end


@gluon.jit
def _load(ptr, off, live):
    """A [64, 32] tile; off and live in MEMORY."""
    return gl.convert_layout(fp32(gl.load(ptr + off, mask=live, other=0.0)), TILE)


@gluon.jit
def _store(ptr, off, x, live):
    x = gl.convert_layout(x, MEMORY)
    if ptr.dtype.element_ty == gl.bfloat16:
        gl.store(ptr + off, bf16(x), mask=live)
    else:
        gl.store(ptr + off, x, mask=live)


@gluon.jit
def _load_all(ptr, off):
    return gl.convert_layout(fp32(gl.load(ptr + off)), TILE)


@gluon.jit
def _row(ptr):
    return gl.expand_dims(gl.load(ptr + gl.arange(0, 32, TOKEN)), 0)


@gluon.jit
def _row_again(ptr):
    """The same, for a second use: another cache modifier keeps the compiler from holding the first one in registers."""
    return gl.expand_dims(gl.load(ptr + gl.arange(0, 32, TOKEN), cache_modifier=".ca"), 0)


@gluon.jit
def _gate(z_ptr, zo, bias, live, tail, rate, bound):
    s = sigmoid(_load(z_ptr, zo, live) + bias, rate)
    return gl.where(tail, (bound * LOG2E) * s, 0.0)


@gluon.jit
def _half(q_ptr, qo, k_ptr, ko, z_ptr, zo, p_ptr, po, rp, dq_ptr, dk_ptr, dz_ptr, oo, a, l, ax, lx, kx, tx,
          anchor, prefix, suffix, before, after, carry, bias, live, tail, rate, bound, scale,
          K: gl.constexpr, SECOND: gl.constexpr):
    """See kside.py; every matrix argument lies in shared memory."""
    up, start, stop, end = _factors(_gate(z_ptr, zo, bias, live, tail, rate, bound), anchor.load(RIGHT))
    stop = stop * exp2(after)
    pre = start * exp2(before)
    beta = _row(rp)
    q = _load(q_ptr, qo, live) * _row(rp + 64)
    k = _load(k_ptr, ko, live) * _row(rp + 128)
    dq = _load_all(p_ptr, po) * (up * (pre * scale))
    dG = q * dq
    dk = _load_all(p_ptr + 64 * K, po) * (up * (beta * -pre))
    dG += k * dk
    dk += _load_all(p_ptr + 128 * K, po) * (rcp(up) * stop)
    if SECOND:
        dq, dk, dG, tx = _pairs(q, k, kx, up * start, beta, ax, lx, dq, dk, dG)
    else:
        t = rcp(up) * (stop * exp2(-after))
        dk += tx * t
        dG -= tx * fp32(bf16(k * t))
    down = rcp(up)
    kh = bf16(k * down)
    dq, dk, dG, t = _pairs(q, k, _left(kh), up, beta, a, l, dq, dk, dG)
    dk += t * down
    dG -= t * fp32(kh)
    a_d = _row(rp + 320)
    gq = (dq + a_d * k - q * _row(rp + 192)) * _row_again(rp + 64)
    _store(dq_ptr, oo, gq, live)
    gk = (dk + a_d * q - k * _row(rp + 256)) * _row_again(rp + 128)
    _store(dk_ptr, oo, gk, live)
    sum_dG = gl.expand_dims(gl.sum(dG, axis=1), 1)
    dg = _map(dG, suffix.load(RIGHT), gl.bfloat16) + carry
    kd = k * (_load_all(p_ptr + 128 * K, po) * (rcp(up) * stop))
    dg += _map(kd, prefix.load(RIGHT), gl.bfloat16)
    x = _load(z_ptr, zo, live) + bias
    s = sigmoid(x, rate)
    dz = gl.where(tail, dg * ((s - s * s) * (bound * rate)), 0.0)
    _store(dz_ptr, oo, dz, live)
    return tx, sum_dG, gl.sum(dz, axis=1), gl.sum(dz * x, axis=1)


@gluon.jit(do_not_specialize=["T", "NT", "HV"])
def kside_hopper_kernel(q_ptr, k_ptr, z_ptr, A_log_ptr, bias_ptr, table_ptr, P_ptr, w_ptr, dA_ptr, dL_ptr, row_ptr,
                        dq_ptr, dk_ptr, dz_ptr, pA_ptr, pb_ptr,
                        q_sb, q_st, q_sh, k_sb, k_st, k_sh, z_sb, z_st, z_sh, T, NT, HV, scale, bound,
                        GROUP: gl.constexpr, K: gl.constexpr, SAME: gl.constexpr, VARLEN: gl.constexpr):
    pid = gl.program_id(0)
    ik = pid % (K // 64)
    hv = (pid // (K // 64)) % HV
    cg = pid // ((K // 64) * HV)
    tile = cg.to(gl.int64) * HV + hv
    dc = ik * 64 + gl.arange(0, 64, CHANNEL)
    if VARLEN:
        b = 0
        row0 = gl.load(table_ptr + cg * 2)
        n = gl.load(table_ptr + cg * 2 + 1)
        if n <= 0:
            gl.store(pb_ptr + tile * K + dc, gl.full([64], 0.0, gl.float32, CHANNEL))
            gl.store(pA_ptr + tile * K + dc, gl.full([64], 0.0, gl.float32, CHANNEL))
            return
        r64 = row0.to(gl.int64)
        out = (r64 * HV + hv) * K
        q_ptr += r64 * q_st
        k_ptr += r64 * k_st
        z_ptr += r64 * z_st
    else:
        b64 = (cg // NT).to(gl.int64)
        row0 = (cg % NT) * 64
        n = gl.minimum(T - row0, 64)
        r64 = row0.to(gl.int64)
        out = ((b64 * T + r64) * HV + hv) * K
        q_ptr += b64 * q_sb + r64 * q_st
        k_ptr += b64 * k_sb + r64 * k_st
        z_ptr += b64 * z_sb + r64 * z_st
    h64 = (hv // GROUP).to(gl.int64)
    q_ptr += h64 * q_sh
    k_ptr += h64 * k_sh
    z_ptr += hv.to(gl.int64) * z_sh
    dq_ptr += out
    dk_ptr += out
    dz_ptr += out
    tail0 = gl.expand_dims(gl.arange(0, 32, TOKEN), 0) < n
    tail1 = gl.expand_dims(gl.arange(32, 64, TOKEN), 0) < n
    d = gl.expand_dims(ik * 64 + gl.arange(0, 64, gl.SliceLayout(1, MEMORY)), 1)
    jj = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, MEMORY)), 0)
    live0 = jj < n
    live1 = 32 + jj < n
    oo = jj * (HV * K) + d          # offsets inside a chunk fit 32 bits (the launcher sees to it)
    if SAME:
        qo = oo
        ko = oo
        zo = oo
    else:
        qo = jj * q_st + d
        ko = jj * k_st + d
        zo = jj * z_st + d
    po = jj * K + d
    rate = gl.exp2(gl.minimum(gl.load(A_log_ptr + hv).to(gl.float32) * LOG2E, 99.0))
    bias = gl.expand_dims(gl.load(bias_ptr + hv * K + dc).to(gl.float32), 1)
    w = gl.expand_dims(gl.load(w_ptr + tile * K + dc), 1)
    rp = row_ptr + tile * 512
    pp = P_ptr + tile * (192 * K)

    # the small matrices, once per program
    ci = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, COPY)), 1)
    cj = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, COPY)), 0)
    mo = tile * 3072 + ci * 32 + cj
    a0 = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dA_ptr + mo))
    l0 = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dL_ptr + mo))
    a1 = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dA_ptr + 1024 + mo))
    l1 = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dL_ptr + 1024 + mo))
    ax = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dA_ptr + 2048 + mo))
    lx = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.load(dL_ptr + 2048 + mo))
    anchor = gl.allocate_shared_memory(
        gl.float16, [32, 32], MATRIX,
        (gl.where(ci <= cj, 1.0, 0.0) - gl.where(ci + cj * 0 < 16, 1.0, 0.0)).to(gl.float16))
    prefix = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.where(ci < cj, 1.0, 0.0).to(gl.bfloat16))
    suffix = gl.allocate_shared_memory(gl.bfloat16, [32, 32], MATRIX, gl.where(ci >= cj, 1.0, 0.0).to(gl.bfloat16))

    end1 = gl.expand_dims(gl.sum(_gate(z_ptr + 32 * z_st, zo, bias, live1, tail1, rate, bound), axis=1), 1)
    u0, start0, stop0, end0 = _factors(_gate(z_ptr, zo, bias, live0, tail0, rate, bound), anchor.load(RIGHT))
    k0 = _load(k_ptr, ko, live0) * _row(rp + 128)
    kl = k0 * (rcp(u0) * stop0)
    kd0 = gl.expand_dims(gl.sum(kl * _load_all(pp + 128 * K, po), axis=1), 1) * exp2(end1)
    none = end0 * 0.0
    tx, sum1, pb1, pA1 = _half(
        q_ptr + 32 * q_st, qo, k_ptr + 32 * k_st, ko, z_ptr + 32 * z_st, zo, pp + 32 * K, po, rp + 32,
        dq_ptr + 32 * HV * K, dk_ptr + 32 * HV * K, dz_ptr + 32 * HV * K, oo, a1, l1, ax, lx,
        _left(bf16(kl)), kl, anchor, prefix, suffix, end0, none, w + kd0, bias, live1, tail1, rate, bound, scale, K, True)
    tx, sum0, pb0, pA0 = _half(
        q_ptr, qo, k_ptr, ko, z_ptr, zo, pp, po, rp, dq_ptr, dk_ptr, dz_ptr, oo, a0, l0, ax, lx, tx, tx,
        anchor, prefix, suffix, none, end1, w + sum1, bias, live0, tail0, rate, bound, scale, K, False)
    gl.store(pb_ptr + tile * K + dc, pb0 + pb1)
    gl.store(pA_ptr + tile * K + dc, pA0 + pA1)
