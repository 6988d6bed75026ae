"""`prep.py` with explicit layouts, for K = 128 channels, bf16, any gate.

A half of the chunk, [32 tokens, 128 channels], is spread so that a thread holds 4 neighbouring tokens of 8 neighbouring
channels: 16-byte accesses, a cumulative sum that stays in the warp, no layout change anywhere.  All inputs are copied
to shared memory at the program's start, so that memory latency is paid once and under another program.  The decayed
operands of A and L go to shared memory once and one wgmma per block, with the queries stacked on the keys (64 rows),
forms both.  The inverse is a kernel of its own (`invert_kernel`): it needs few registers and no channels.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from .hopper import LOG2E, bf16, exp2, fp32, gate_sigmoid, log2_decay, rcp

TILE = gl.constexpr(gl.BlockedLayout([4, 8], [8, 4], [1, 4], [1, 0]))
TOKEN = gl.constexpr(gl.SliceLayout(1, TILE.value))
CHANNEL = gl.constexpr(gl.SliceLayout(0, TILE.value))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
STAGE = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
# the fp32 decays of a half in the place of the raw gates: a thread's 16-byte pieces of two token groups on different banks
KEPT = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=2, order=[1, 0]))
SQUARE = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=2, max_phase=4, order=[1, 0]))
QUARTER = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _stage(ptr, st, n):
    """Start copying a [64, 128] tile; rows beyond the document arrive as zeros."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ROWS)), 1)
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
    s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], STAGE)
    async_copy.async_copy_global_to_shared(s, ptr + (r * st + c), mask=r < n)
    async_copy.commit_group()
    return s


@gluon.jit
def _load(stage, H: gl.constexpr):
    return fp32(stage.slice(32 * H, 32).load(TILE))


@gluon.jit
def _gate(stage, H: gl.constexpr, live, bias, rate, bound, BOUNDED: gl.constexpr):
    return gl.where(live, log2_decay(_load(stage, H), rate, bias, bound, BOUNDED), 0.0)


@gluon.jit
def _anchored(g, W: gl.constexpr):
    """Log2 decay from the middle of each block of 2W tokens to each of its tokens: in the second W tokens the inclusive
    sum since the middle, in the first W minus what follows up to the middle."""
    x = gl.reshape(g, [32 // W, W, 128])
    c = gl.reshape(gl.associative_scan(x, 1, _add), [32, 128])
    total = gl.expand_dims(gl.sum(x, axis=1), 1) + x * 0.0
    first = gl.expand_dims(gl.arange(0, 32, TOKEN), 1) % (2 * W) < W
    return gl.convert_layout(c, TILE) - gl.where(first, gl.convert_layout(gl.reshape(total, [32, 128]), TILE), 0.0)


@gluon.jit
def _level(q, k, g, queries, keys, zero, W: gl.constexpr):
    """Products of the pairs that straddle the middle of a block of 2W tokens: every exponent is <= 0."""
    x = exp2(-gl.abs(_anchored(g, W)))
    y = bf16(k * x)
    gl.thread_barrier()
    queries.slice(0, 32).store(bf16(q * x))
    queries.slice(32, 32).store(y)
    keys.store(y)
    fence_async_shared()
    gl.thread_barrier()
    return warpgroup_mma(queries, keys.permute([1, 0]), zero, is_async=False)


@gluon.jit
def _merge(acc, a8, a16, i, j):
    """One causal half from its 8-token blocks and the two levels between them; i, j inside the half."""
    return gl.where(i // 8 == j // 8, acc, gl.where(i // 16 == j // 16, a8, a16))


@gluon.jit
def _sums(g):
    """Per channel, over the half's tokens: the first 16, and all."""
    x = gl.sum(gl.reshape(g, [2, 16, 128]), axis=1)
    first = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, x.type.layout)), 1) == 0
    early = gl.convert_layout(gl.sum(gl.where(first, x, 0.0), axis=0), CHANNEL)
    return gl.expand_dims(early, 0), gl.expand_dims(gl.convert_layout(gl.sum(x, axis=0), CHANNEL), 0)


@gluon.jit
def _normalised(x, row_ptr, scale):
    r = gl.rsqrt(gl.sum(x * x, axis=1) + 1e-6)
    gl.store(row_ptr + gl.arange(0, 32, TOKEN), r)
    return x * gl.expand_dims(r * scale, 1)


@gluon.jit
def _from_start(anchored, x, G, mid, BS: gl.constexpr):
    """x times the decay from the half's start; anchored: x times the decay from its middle."""
    if BS == 32:
        return anchored * exp2(mid)
    else:
        return x * exp2(G)


@gluon.jit
def _to_end(anchored, x, G, mid, end, BS: gl.constexpr):
    """x times the decay to the half's end; anchored: x over the decay from its middle."""
    if BS == 32:
        return anchored * exp2(end - mid)
    else:
        return x * exp2(end - G)


@gluon.jit
def prep_hopper_kernel(
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
    L_ptr,
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
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BOUNDED: gl.constexpr,
    BS: gl.constexpr,
    VARLEN: gl.constexpr,
):
    pid = gl.program_id(0)
    hv = pid % HV
    cg = pid // HV
    tile = pid.to(gl.int64)
    if VARLEN:
        row0 = gl.load(table_ptr + cg * 2)
        n = gl.load(table_ptr + cg * 2 + 1)
        if n <= 0:
            return
        r64 = row0.to(gl.int64)
    else:
        row0 = (cg % NT) * 64
        n = gl.minimum(T - row0, 64)
        r64 = row0.to(gl.int64)
        b64 = (cg // NT).to(gl.int64)
        q_ptr += b64 * q_sb
        k_ptr += b64 * k_sb
        z_ptr += b64 * z_sb
        beta_ptr += b64 * b_sb
    h64 = (hv // GROUP).to(gl.int64)
    q_ptr += r64 * q_st + h64 * q_sh
    k_ptr += r64 * k_st + h64 * k_sh
    z_ptr += r64 * z_st + hv.to(gl.int64) * z_sh
    beta_ptr += r64 * b_st + hv.to(gl.int64) * b_sh
    z_s = _stage(z_ptr, z_st, n)
    k_s = _stage(k_ptr, k_st, n)
    q_s = _stage(q_ptr, q_st, n)
    rp = row_ptr + tile * 512
    t = gl.arange(0, 32, TOKEN)
    dc = gl.arange(0, 128, CHANNEL)
    d = gl.expand_dims(dc, 0)
    live0 = gl.expand_dims(t, 1) < n
    live1 = gl.expand_dims(t + 32, 1) < n
    rate = exp2(gl.minimum(gl.load(A_log_ptr + hv).to(gl.float32) * LOG2E, 99.0))
    bias = gl.expand_dims(gl.load(bias_ptr + hv * K + dc).to(gl.float32), 0)
    beta0 = gl.load(beta_ptr + t * b_st, mask=t < n, other=0.0).to(gl.float32)
    beta1 = gl.load(beta_ptr + (t + 32) * b_st, mask=t + 32 < n, other=0.0).to(gl.float32)
    gl.store(rp + t, gl.where(t < n, gate_sigmoid(beta0, 1.0, 0.0), 0.0))
    gl.store(rp + 32 + t, gl.where(t + 32 < n, gate_sigmoid(beta1, 1.0, 0.0), 0.0))

    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 128], OPERAND)
    across = gl.allocate_shared_memory(gl.bfloat16, [64, 128], OPERAND)
    keys = gl.allocate_shared_memory(gl.bfloat16, [32, 128], OPERAND)
    ends = gl.allocate_shared_memory(gl.bfloat16, [32, 128], OPERAND)
    so = tile * (64 * K) + (gl.expand_dims(t, 1) * K + d)
    zero = gl.full([64, 32], 0.0, gl.float32, ACC)

    # the second half's gates first: the first half needs their sum
    async_copy.wait_group(2)
    gl.thread_barrier()
    g1 = _gate(z_s, 1, live1, bias, rate, bound, BOUNDED)
    mid1, end1 = _sums(g1)
    g0 = _gate(z_s, 0, live0, bias, rate, bound, BOUNDED)
    mid0, end0 = _sums(g0)
    gl.thread_barrier()  # the raw gates have been read
    kept = z_s._reinterpret(gl.float32, [32, 128], KEPT)
    kept.store(g1)
    G = gl.associative_scan(g0, 0, _add)
    if BS == 32:
        up = exp2(G - mid0)
    else:
        up = exp2(_anchored(g0, 4))
    down = rcp(up)
    after = exp2(end1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    k = _normalised(_load(k_s, 0), rp + 128, 1.0)
    x = k * up
    queries.slice(32, 32).store(bf16(x))
    gl.store(Kp_ptr + so, bf16(_from_start(x, k, G, mid0, BS)))
    x = k * down
    keys.store(bf16(x))
    x = _to_end(x, k, G, mid0, end0, BS)
    ends.store(bf16(x))
    gl.store(Kb_ptr + so, bf16(x * after))
    q = _normalised(_load(q_s, 0), rp + 64, scale)
    x = q * up
    queries.slice(0, 32).store(bf16(x))
    gl.store(Qp_ptr + so, bf16(_from_start(x, q, G, mid0, BS)))
    fence_async_shared()
    gl.thread_barrier()
    acc0 = warpgroup_mma(queries, keys.permute([1, 0]), zero, is_async=False)
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ACC)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, ACC)), 0)
    if BS == 8:
        a16 = _level(q, k, g0, queries, keys, zero, 16)
        acc0 = _merge(acc0, _level(q, k, g0, queries, keys, zero, 8), a16, i % 32, j)
        gl.thread_barrier()

    before = exp2(end0)
    gl.store(gam_ptr + tile * K + d, before * after)
    g1 = kept.load(TILE)
    G = gl.associative_scan(g1, 0, _add)
    if BS == 32:
        up = exp2(G - mid1)
    else:
        up = exp2(_anchored(g1, 4))
    down = rcp(up)
    k = _normalised(_load(k_s, 1), rp + 160, 1.0)
    x = k * up
    queries.slice(32, 32).store(bf16(x))
    x = _from_start(x, k, G, mid1, BS)
    across.slice(32, 32).store(bf16(x))
    gl.store(Kp_ptr + 32 * K + so, bf16(x * before))
    x = k * down
    keys.store(bf16(x))
    gl.store(Kb_ptr + 32 * K + so, bf16(_to_end(x, k, G, mid1, end1, BS)))
    q = _normalised(_load(q_s, 1), rp + 96, scale)
    x = q * up
    queries.slice(0, 32).store(bf16(x))
    x = _from_start(x, q, G, mid1, BS)
    across.slice(0, 32).store(bf16(x))
    gl.store(Qp_ptr + 32 * K + so, bf16(x * before))
    fence_async_shared()
    gl.thread_barrier()
    accx = warpgroup_mma(across, ends.permute([1, 0]), zero, is_async=False)
    acc1 = warpgroup_mma(queries, keys.permute([1, 0]), zero, is_async=False)
    if BS == 8:
        a16 = _level(q, k, g1, queries, keys, zero, 16)
        acc1 = _merge(acc1, _level(q, k, g1, queries, keys, zero, 8), a16, i % 32, j)

    # queries' rows become A, keys' rows L; both leave in 16-byte stores through buffers that are no longer needed
    a_s = across._reinterpret(gl.bfloat16, [3, 64, 32], SQUARE)
    l_s = queries._reinterpret(gl.float16, [3, 64, 32], SQUARE)
    gl.thread_barrier()
    a_s.index(0).store(bf16(gl.where(i >= j, acc0, 0.0)))
    a_s.index(1).store(bf16(gl.where(i >= j, acc1, 0.0)))
    a_s.index(2).store(bf16(accx))
    l_s.index(0).store(gl.where(i - 32 > j, acc0, 0.0).to(gl.float16))
    l_s.index(1).store(gl.where(i - 32 > j, acc1, 0.0).to(gl.float16))
    l_s.index(2).store(accx.to(gl.float16))
    gl.thread_barrier()
    ri = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, QUARTER)), 1)
    rj = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, QUARTER)), 0)
    ao = tile * 4096 + (ri * 64 + rj)
    gl.store(A_ptr + ao, a_s.index(0).slice(0, 32).load(QUARTER))
    gl.store(A_ptr + ao + 32, gl.full([32, 32], 0.0, gl.bfloat16, QUARTER))
    gl.store(A_ptr + ao + 2048, a_s.index(2).slice(0, 32).load(QUARTER))
    gl.store(A_ptr + ao + 2080, a_s.index(1).slice(0, 32).load(QUARTER))
    lo = tile * 3072 + (ri * 32 + rj)
    for m in gl.static_range(3):
        gl.store(L_ptr + lo + 1024 * m, l_s.index(m).slice(32, 32).load(QUARTER))


@triton.jit
def _blocks(lower_left, upper_left, lower_right):
    """[2, 16, 16] each -> lower block-triangular [2, 32, 32]."""
    top = tl.permute(tl.join(upper_left, lower_left * 0.0), (0, 1, 3, 2)).reshape(2, 16, 32)
    bottom = tl.permute(tl.join(lower_left, lower_right), (0, 1, 3, 2)).reshape(2, 16, 32)
    return tl.permute(tl.join(top, bottom), (0, 3, 1, 2)).reshape(2, 32, 32)


@triton.jit(do_not_specialize=["HV"])
def invert_kernel(L_ptr, row_ptr, table_ptr, M_ptr, HV, VARLEN: tl.constexpr):
    """M = (I + beta L)^-1 of a chunk from the three blocks of L (fp16), by block doubling: the four blocks of 16 tokens
    on the diagonal side by side, then the two halves, then the block between them."""
    pid = tl.program_id(0)
    if VARLEN:  # noqa: SIM102  (a static and a run-time condition)
        if tl.load(table_ptr + (pid // HV) * 2 + 1) <= 0:
            return
    tile = tl.cast(pid, tl.int64)
    L_ptr += tile * 3072
    row_ptr += tile * 512
    b = tl.arange(0, 4)[:, None, None]
    h = tl.arange(0, 2)[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    L = tl.load(L_ptr + ((b // 2) * 1024 + (b % 2) * 528 + i * 32 + j)).to(tl.float32) * tl.load(row_ptr + (b * 16 + i))
    below = tl.load(L_ptr + (h * 1024 + 512 + i * 32 + j)).to(tl.float32) * tl.load(row_ptr + (h * 32 + 16 + i))
    t = tl.arange(0, 32)
    at = t[:, None] * 32 + t[None, :]
    between = tl.load(L_ptr + 2048 + at).to(tl.float32) * tl.load(row_ptr + 32 + t)[:, None]
    M = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2) == (j // 2), L, 0.0)
    for lg in tl.static_range(1, 4):
        pair = ((i >> (lg + 1)) == (j >> (lg + 1))) & ((i >> lg) > (j >> lg))
        Mh = M.to(tl.float16)
        M -= tl.dot(tl.dot(Mh, tl.where(pair, L, 0.0).to(tl.float16)).to(tl.float16), Mh)
    first, second = tl.split(tl.permute(M.to(tl.float16).reshape(2, 2, 16, 16), (0, 2, 3, 1)))
    X = tl.dot(second, tl.dot(below.to(tl.float16), first).to(tl.float16)).to(tl.float16)
    M0, M1 = tl.split(tl.permute(_blocks(-X, first, second), (1, 2, 0)))
    Mx = tl.dot(M1, tl.dot(between.to(tl.float16), M0).to(tl.float16))
    mp = M_ptr + tile * 4096 + (t[:, None] * 64 + t[None, :])
    tl.store(mp, M0.to(tl.bfloat16))
    tl.store(mp + 32, tl.zeros((32, 32), tl.bfloat16))
    tl.store(mp + 2048, (-Mx).to(tl.bfloat16))
    tl.store(mp + 2080, M1.to(tl.bfloat16))
