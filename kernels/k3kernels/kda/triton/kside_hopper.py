"""`kside.py` with explicit layouts, for K = 128 channels, bf16, any gate.

The plain version is limited by registers and by layout changes through shared memory.  Here every [64 channels, 32
tokens] tensor lives in one layout, TILE, that is the mma.sync accumulator with its rows renamed (a warp's accumulator
rows g and g + 8 hold channels 2g and 2g + 1).  Loads and stores of 2 channels are 4 bytes wide and fill whole sectors;
the change from TILE to a left operand, and from an accumulator to TILE, renames registers.  All inputs of a program are
copied to shared memory at its start (asynchronously, 66 KB; 16 KB more keep the decays), so that the two programs of a multiprocessor overlap
latency with arithmetic, and a value that is needed twice is read twice instead of being held in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .hopper import FLOOR2, LOG2E, bf16, exp2, fp32, gate_sigmoid, log2_decay, rcp

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
# TILE with the registers of two neighbouring channels next to each other, as memory wants them; same data per thread.
MEMORY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
TOKEN = gl.constexpr(gl.SliceLayout(0, TILE.value))
CHANNEL = gl.constexpr(gl.SliceLayout(1, TILE.value))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
STAGE = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=2, max_phase=4, order=[1, 0]))
# fp32 [channels, tokens] written and read in TILE: the 8 channels of a warp's access fall on different banks
KEPT = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=2, max_phase=4, order=[1, 0]))


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
    if HT == gl.bfloat16:  # noqa: SIM300
        hi = bf16(x)
        lo = bf16(x - fp32(hi))
    else:
        hi = x.to(HT)
        lo = (x - hi.to(gl.float32)).to(HT)
    acc = mma_v2(_left(lo), m, gl.full([64, 32], 0.0, gl.float32, ACC))
    return _tile(mma_v2(_left(hi), m, acc))


@gluon.jit
def _pairs(q, k, kh, up, a, l, dq, dk, dG):
    """See kside.py; a, l in shared memory, kh a left operand."""
    qh = bf16(q * up)
    t = _product(kh, a.permute([1, 0]).load(RIGHT))
    dq += t * up
    dG += t * fp32(qh)
    bh = bf16(k * up)
    t = _product(kh, l.permute([1, 0]).load(RIGHT))
    dk += t * up
    dG += t * fp32(bh)
    acc = mma_v2(_left(qh), a.load(RIGHT), gl.full([64, 32], 0.0, gl.float32, ACC))
    return dq, dk, dG, _tile(mma_v2(_left(bh), l.load(RIGHT), acc))


@gluon.jit
def _factors(g, maps, BS: gl.constexpr):
    """Of one half: the queries' factor of a block (its reciprocal is the keys'), factors from the half's start and to
    its end, and the half's log2 decay per channel."""
    up = exp2(_map(g, maps.index(0).load(RIGHT), gl.float16))
    end = gl.expand_dims(gl.sum(g, axis=1), 1)
    if BS == 32:
        j = gl.expand_dims(gl.arange(0, 32, TOKEN), 0)
        mid = gl.expand_dims(gl.sum(gl.where(j < 16, g, 0.0), axis=1), 1)
        first = up * exp2(mid)
        last = rcp(up) * exp2(end - mid)
    else:
        G = _map(g, maps.index(1).load(RIGHT), gl.float16)
        first = exp2(G)
        last = exp2(end - G)
    return up, first, last, end


@gluon.jit
def _load(stage, H: gl.constexpr):
    """Half H of a staged [64 tokens, 64 channels] tile, as [channels, tokens]."""
    return gl.convert_layout(fp32(stage.slice(32 * H, 32).permute([1, 0]).load(MEMORY)), TILE)


@gluon.jit
def _store(ptr, off, x, live):
    x = gl.convert_layout(x, MEMORY)
    if ptr.dtype.element_ty == gl.bfloat16:
        gl.store(ptr + off, bf16(x), mask=live)
    else:
        gl.store(ptr + off, x, mask=live)


@gluon.jit
def _row(rows_s, R: gl.constexpr, H: gl.constexpr):
    """Row scalar R (see vside.py) of half H, for TILE."""
    return gl.expand_dims(rows_s.slice(64 * R + 32 * H, 32).load(TOKEN), 0)


@gluon.jit
def _gate(z, H: gl.constexpr, bias, tail, rate, bound, BOUNDED: gl.constexpr):
    return gl.where(tail, log2_decay(_load(z, H), rate, bias, bound, BOUNDED), 0.0)


@gluon.jit
def _block(q, k, up, down, a, l, dq, dk, dG):
    kh = bf16(k * down)
    dq, dk, dG, t = _pairs(q, k, _left(kh), up, a, l, dq, dk, dG)
    return dq, dk + t * down, dG - t * fp32(kh)


@gluon.jit
def _half(
    q_s,
    k_s,
    z_s,
    g_s,
    p0,
    p1,
    p2,
    rows_s,
    dq_ptr,
    dk_ptr,
    dz_ptr,
    oo,
    mats,
    kx,
    tx,
    maps,
    sums,
    other,
    carry,
    bias,
    live,
    tail,
    rate,
    bound,
    H: gl.constexpr,
    BOUNDED: gl.constexpr,
    BS: gl.constexpr,
):
    """See kside.py; tiles, matrices and maps lie in shared memory, and so do both halves' decays g_s.  other: the log2
    decay of the other half, which lies before half 1 and after half 0."""
    LEVELS: gl.constexpr = 1 if BS == 32 else 3
    up, first, last, end = _factors(g_s.index(H).load(TILE), maps, BS)
    q = _load(q_s, H) * _row(rows_s, 1, H)
    k = _load(k_s, H) * _row(rows_s, 2, H)
    start = first
    finish = last
    if H == 1:
        start = first * exp2(other)
    else:
        finish = last * exp2(other)
    dq = _load(p0, H) * start
    dG = q * dq
    dk = _load(p1, H) * start
    dG += k * dk
    dk += _load(p2, H) * finish
    if H == 1:
        dq, dk, dG, tx = _pairs(q, k, kx, first, mats.index(4 * LEVELS), mats.index(4 * LEVELS + 1), dq, dk, dG)
    else:
        dk += tx * last
        dG -= tx * fp32(bf16(k * last))
    m: gl.constexpr = 2 * LEVELS * H
    dq, dk, dG = _block(q, k, up, rcp(up), mats.index(m), mats.index(m + 1), dq, dk, dG)
    if BS == 8:
        g = g_s.index(H).load(TILE)
        x = exp2(-gl.abs(_map(g, maps.index(2).load(RIGHT), gl.float16)))
        dq, dk, dG = _block(q, k, x, x, mats.index(m + 2), mats.index(m + 3), dq, dk, dG)
        x = exp2(-gl.abs(_map(g, maps.index(3).load(RIGHT), gl.float16)))
        dq, dk, dG = _block(q, k, x, x, mats.index(m + 4), mats.index(m + 5), dq, dk, dG)
    a_d = _row(rows_s, 5, H)
    _store(dq_ptr, oo, (dq + a_d * k - q * _row(rows_s, 3, H)) * _row(rows_s, 1, H), live)
    _store(dk_ptr, oo, (dk + a_d * q - k * _row(rows_s, 4, H)) * _row(rows_s, 2, H), live)
    sum_dG = gl.expand_dims(gl.sum(dG, axis=1), 1)
    dg = _map(dG, sums.index(0).load(RIGHT), gl.bfloat16) + carry
    dg += _map(k * (_load(p2, H) * finish), sums.index(1).load(RIGHT), gl.bfloat16)
    z = _load(z_s, H)
    g = g_s.index(H).load(TILE)
    if BOUNDED:
        s = g * (1.0 / (bound * LOG2E))
        dz = gl.where(tail, dg * ((s - s * s) * (bound * rate)), 0.0)
        dA = dz * z
    else:
        alive = tail & (g > FLOOR2)
        dz = gl.where(alive, dg * (gate_sigmoid(z, 1.0, bias) * -rate), 0.0)
        dA = gl.where(alive, dg * g * (1.0 / LOG2E), 0.0)
    _store(dz_ptr, oo, dz, live)
    return tx, sum_dG, gl.expand_dims(gl.sum(dz, axis=1), 1), gl.expand_dims(gl.sum(dA, axis=1), 1)


@gluon.jit
def _stage(ptr, st, rows, cols, live):
    """Start copying a [64, 64] tile; rows beyond the document arrive as zeros."""
    s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], STAGE)
    async_copy.async_copy_global_to_shared(s, ptr + (rows * st + cols), mask=live)
    return s


@gluon.jit(do_not_specialize=["T", "NT", "HV"])
def kside_hopper_kernel(
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
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BOUNDED: gl.constexpr,
    BS: gl.constexpr,
    VARLEN: gl.constexpr,
):
    pid = gl.program_id(0)
    ik = pid % (K // 64)
    hv = (pid // (K // 64)) % HV
    cg = pid // ((K // 64) * HV)
    tile = cg.to(gl.int64) * HV + hv
    dc = ik * 64 + gl.arange(0, 64, CHANNEL)
    if VARLEN:
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
    oo = jj * (HV * K) + d  # offsets inside a chunk fit 32 bits (the launcher sees to it)
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ROWS)), 1)
    cols = gl.expand_dims(ik * 64 + gl.arange(0, 64, gl.SliceLayout(0, ROWS)), 0)
    copied = rows < n
    pp = P_ptr + tile * (192 * K)
    z_s = _stage(z_ptr, z_st, rows, cols, copied)
    k_s = _stage(k_ptr, k_st, rows, cols, copied)
    p2 = _stage(pp + 128 * K, K, rows, cols, rows < 64)
    flat = gl.arange(0, 512, FLAT)
    rows_s = gl.allocate_shared_memory(gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    async_copy.async_copy_global_to_shared(rows_s, row_ptr + tile * 512 + flat)
    async_copy.commit_group()
    mi = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, COPY)), 1)
    mj = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, COPY)), 0)
    mo = tile * 3072 + (mi * 32 + mj)
    LEVELS: gl.constexpr = 1 if BS == 32 else 3
    mats = gl.allocate_shared_memory(gl.bfloat16, [4 * LEVELS + 2, 32, 32], MATRIX)
    if BS == 32:
        for m in gl.static_range(2):
            async_copy.async_copy_global_to_shared(mats.index(2 * m), dA_ptr + (1024 * m) + mo)
            async_copy.async_copy_global_to_shared(mats.index(2 * m + 1), dL_ptr + (1024 * m) + mo)
    else:
        same8 = mi // 8 == mj // 8
        same16 = (mi // 16 == mj // 16) & (mi // 8 > mj // 8)
        same32 = mi // 16 > mj // 16
        for m in gl.static_range(2):
            a = gl.load(dA_ptr + (1024 * m) + mo)
            l = gl.load(dL_ptr + (1024 * m) + mo)
            mats.index(6 * m).store(gl.where(same8, a, a * 0.0))
            mats.index(6 * m + 1).store(gl.where(same8, l, l * 0.0))
            mats.index(6 * m + 2).store(gl.where(same16, a, a * 0.0))
            mats.index(6 * m + 3).store(gl.where(same16, l, l * 0.0))
            mats.index(6 * m + 4).store(gl.where(same32, a, a * 0.0))
            mats.index(6 * m + 5).store(gl.where(same32, l, l * 0.0))
    async_copy.async_copy_global_to_shared(mats.index(4 * LEVELS), dA_ptr + 2048 + mo)
    async_copy.async_copy_global_to_shared(mats.index(4 * LEVELS + 1), dL_ptr + 2048 + mo)
    q_s = _stage(q_ptr, q_st, rows, cols, copied)
    p0 = _stage(pp, K, rows, cols, rows < 64)
    p1 = _stage(pp + 64 * K, K, rows, cols, rows < 64)
    async_copy.commit_group()

    rate = gl.exp2(gl.minimum(gl.load(A_log_ptr + hv).to(gl.float32) * LOG2E, 99.0))
    bias = gl.expand_dims(gl.load(bias_ptr + hv * K + dc).to(gl.float32), 1)
    w = gl.expand_dims(gl.load(w_ptr + tile * K + dc), 1)
    # token maps: rows are summed over, columns are results
    maps = gl.allocate_shared_memory(gl.float16, [1 if BS == 32 else 4, 32, 32], MATRIX)
    upto = gl.where(mi <= mj, 1.0, 0.0)
    maps.index(0).store((upto - gl.where(mi < mj // BS * BS + BS // 2, 1.0, 0.0)).to(gl.float16))
    if BS == 8:
        maps.index(1).store(upto.to(gl.float16))
        maps.index(2).store((upto - gl.where(mi < mj // 16 * 16 + 8, 1.0, 0.0)).to(gl.float16))
        maps.index(3).store((upto - gl.where(mi + mj * 0 < 16, 1.0, 0.0)).to(gl.float16))
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, 32], MATRIX)
    sums.index(0).store(gl.where(mi >= mj, 1.0, 0.0).to(gl.bfloat16))
    sums.index(1).store(gl.where(mi < mj, 1.0, 0.0).to(gl.bfloat16))

    async_copy.wait_group(1)
    gl.thread_barrier()
    g_s = gl.allocate_shared_memory(gl.float32, [2, 64, 32], KEPT)
    g1 = _gate(z_s, 1, bias, tail1, rate, bound, BOUNDED)
    g_s.index(1).store(g1)
    end1 = gl.expand_dims(gl.sum(g1, axis=1), 1)
    g0 = _gate(z_s, 0, bias, tail0, rate, bound, BOUNDED)
    g_s.index(0).store(g0)
    u0, f0, last0, end0 = _factors(g0, maps, BS)
    kl = _load(k_s, 0) * _row(rows_s, 2, 0) * last0
    kd0 = gl.expand_dims(gl.sum(kl * _load(p2, 0), axis=1), 1) * exp2(end1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    tx, sum1, pb1, pA1 = _half(
        q_s,
        k_s,
        z_s,
        g_s,
        p0,
        p1,
        p2,
        rows_s,
        dq_ptr + 32 * HV * K,
        dk_ptr + 32 * HV * K,
        dz_ptr + 32 * HV * K,
        oo,
        mats,
        _left(bf16(kl)),
        kl,
        maps,
        sums,
        end0,
        w + kd0,
        bias,
        live1,
        tail1,
        rate,
        bound,
        1,
        BOUNDED,
        BS,
    )
    tx, sum0, pb0, pA0 = _half(
        q_s,
        k_s,
        z_s,
        g_s,
        p0,
        p1,
        p2,
        rows_s,
        dq_ptr,
        dk_ptr,
        dz_ptr,
        oo,
        mats,
        tx,
        tx,
        maps,
        sums,
        end1,
        w + sum1,
        bias,
        live0,
        tail0,
        rate,
        bound,
        0,
        BOUNDED,
        BS,
    )
    pb = pb0 + pb1
    pA = pA0 + pA1
    if BOUNDED:
        pA += bias * pb
    one = gl.expand_dims(dc, 1)
    gl.store(pb_ptr + tile * K + one, pb)
    gl.store(pA_ptr + tile * K + one, pA)
