"""`vside.py` with explicit layouts, for K = V = 128 channels and bf16.

All tiles that feed a tensor-core product are copied to shared memory at the start (112 KB, two programs per
multiprocessor); results leave through the buffers of operands that are no longer needed, in 16-byte stores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper import bf16, fp32

WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ROW = gl.constexpr(gl.SliceLayout(1, ROWS.value))
COL = gl.constexpr(gl.SliceLayout(0, ROWS.value))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PANEL = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


@gluon.jit
def _fetch(ptr, st, R: gl.constexpr, n):
    """Start copying an [R, 128] tile; rows from n on arrive as zeros."""
    r = gl.expand_dims(gl.arange(0, R, ROW), 1)
    c = gl.expand_dims(gl.arange(0, 128, COL), 0)
    s = gl.allocate_shared_memory(gl.bfloat16, [R, 128], WIDE)
    async_copy.async_copy_global_to_shared(s, ptr + (r * st + c), mask=r < n)
    return s


@gluon.jit
def _rows(ptr, st, R: gl.constexpr, n):
    """16 rows from R on; rows from n on are zeros."""
    r = gl.expand_dims(R + gl.arange(0, 16, ROW), 1)
    c = gl.expand_dims(gl.arange(0, 128, COL), 0)
    return gl.load(ptr + (r * st + c), mask=r < n, other=0.0)


@gluon.jit
def _row_sums(R: gl.constexpr, v, o, beta, do_s, Y_s, vn_s, row_ptr, db_ptr, dv_ptr, n, HV, scale):
    """Row scalars, dbeta and dv of 16 rows."""
    t = R + gl.arange(0, 16, ROW)
    do = fp32(do_s.slice(R, 16).load(ROWS))
    Y = fp32(Y_s.slice(R, 16).load(ROWS))
    vn = fp32(vn_s.slice(R, 16).load(ROWS))
    y_vn = gl.sum(Y * vn, axis=1)
    gl.store(row_ptr + 192 + t, gl.sum(fp32(o) * do, axis=1))
    gl.store(row_ptr + 256 + t, 2.0 * y_vn - beta * gl.sum(Y * fp32(v), axis=1))
    gl.store(row_ptr + 320 + t, gl.sum(do * vn, axis=1) * scale)
    gl.store(db_ptr + t * HV, ((1.0 - beta) * y_vn).to(db_ptr.dtype.element_ty), mask=t < n)
    r = gl.expand_dims(t, 1)
    c = gl.expand_dims(gl.arange(0, 128, COL), 0)
    gl.store(dv_ptr + (r * (HV * 128) + c), bf16(Y * gl.expand_dims(beta, 1)), mask=r < n)


@gluon.jit(do_not_specialize=["T", "NT", "HV"])
def vside_hopper_kernel(
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
        head = r64 * HV + hv
    else:
        row0 = (cg % NT) * 64
        n = gl.minimum(T - row0, 64)
        r64 = row0.to(gl.int64)
        b64 = (cg // NT).to(gl.int64)
        head = (b64 * T + r64) * HV + hv
        v_ptr += b64 * v_sb
        do_ptr += b64 * do_sb
    v_ptr += r64 * v_st + hv.to(gl.int64) * v_sh
    do_ptr += r64 * do_st + hv.to(gl.int64) * do_sh
    o_ptr += head * 128
    dv_ptr += head * 128
    db_ptr += head
    row_ptr += tile * 512
    do_s = _fetch(do_ptr, do_st, 64, n)
    Y_s = _fetch(Y_ptr + tile * 8192, 128, 64, 64)
    vn_s = _fetch(vn_ptr + tile * 8192, 128, 64, 64)
    async_copy.commit_group()
    h_s = _fetch(h_ptr + tile * 16384, 128, 128, 128)
    async_copy.commit_group()
    dS_s = _fetch(dS_ptr + tile * 16384, 128, 128, 128)
    async_copy.commit_group()

    # what does not feed a product goes to registers, all under way before the first is needed: stores in between would
    # keep the compiler from asking early
    b0 = gl.load(row_ptr + gl.arange(0, 16, ROW))
    b1 = gl.load(row_ptr + 16 + gl.arange(0, 16, ROW))
    b2 = gl.load(row_ptr + 32 + gl.arange(0, 16, ROW))
    b3 = gl.load(row_ptr + 48 + gl.arange(0, 16, ROW))
    beta_s = gl.expand_dims(gl.load(row_ptr + gl.arange(0, 64, gl.SliceLayout(1, SQUARE))), 1)
    beta_p = gl.expand_dims(gl.load(row_ptr + gl.arange(0, 64, gl.SliceLayout(1, PANEL))), 1)
    gam = gl.load(gam_ptr + tile * 128 + gl.arange(0, 128, COL))
    v0 = _rows(v_ptr, v_st, 0, n)
    o0 = _rows(o_ptr, HV * 128, 0, n)
    v1 = _rows(v_ptr, v_st, 16, n)
    o1 = _rows(o_ptr, HV * 128, 16, n)
    v2 = _rows(v_ptr, v_st, 32, n)
    o2 = _rows(o_ptr, HV * 128, 32, n)
    v3 = _rows(v_ptr, v_st, 48, n)
    o3 = _rows(o_ptr, HV * 128, 48, n)

    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, SQUARE)), 1)
    j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, SQUARE)), 0)
    square = gl.full([64, 64], 0.0, gl.float32, SQUARE)
    panel = gl.full([64, 128], 0.0, gl.float32, PANEL)
    async_copy.wait_group(2)
    fence_async_shared()
    gl.thread_barrier()
    dA = warpgroup_mma(do_s, vn_s.permute([1, 0]), square, use_acc=False, is_async=True)
    dL = warpgroup_mma(Y_s, vn_s.permute([1, 0]), square, use_acc=False, is_async=True)

    c = gl.expand_dims(gl.arange(0, 128, COL), 0)
    _row_sums(0, v0, o0, b0, do_s, Y_s, vn_s, row_ptr, db_ptr, dv_ptr, n, HV, scale)
    _row_sums(16, v1, o1, b1, do_s, Y_s, vn_s, row_ptr, db_ptr, dv_ptr, n, HV, scale)
    _row_sums(32, v2, o2, b2, do_s, Y_s, vn_s, row_ptr, db_ptr, dv_ptr, n, HV, scale)
    _row_sums(48, v3, o3, b3, do_s, Y_s, vn_s, row_ptr, db_ptr, dv_ptr, n, HV, scale)

    dA, dL = warpgroup_mma_wait(0, deps=[dA, dL])
    block = gl.where(i < 32, 0, gl.where(j < 32, 2, 1))
    bo = tile * 3072 + (block * 1024 + (i % 32) * 32 + j % 32)
    keep = (i >= 32) | (j < 32)
    gl.store(dA_ptr + bo, bf16(gl.where(i > j, dA * scale, 0.0)), mask=keep)
    gl.store(dL_ptr + bo, bf16(gl.where(i > j, dL * -beta_s, 0.0)), mask=keep)

    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    P0 = warpgroup_mma(do_s, h_s, panel, use_acc=False, is_async=True)
    P1 = warpgroup_mma(Y_s, h_s, panel, use_acc=False, is_async=True)
    acc = gl.full([16, 128], 0.0, gl.float32, ROWS)
    for r0 in gl.static_range(0, 128, 16):
        acc += fp32(h_s.slice(r0, 16).load(ROWS)) * fp32(dS_s.slice(r0, 16).load(ROWS))
    d = gl.arange(0, 128, COL)
    gl.store(w_ptr + tile * 128 + d, gl.sum(acc, axis=0) * gam)
    P0, P1 = warpgroup_mma_wait(0, deps=[P0, P1])
    gl.thread_barrier()
    h_s.slice(0, 64).store(bf16(P0 * scale))
    h_s.slice(64, 64).store(bf16(P1 * -beta_p))
    P2 = warpgroup_mma(vn_s, dS_s, panel, use_acc=False, is_async=True)
    gl.thread_barrier()
    for r0 in gl.static_range(0, 128, 32):
        r = gl.expand_dims(r0 + gl.arange(0, 32, ROW), 1)
        gl.store(P_ptr + tile * 24576 + (r * 128 + c), h_s.slice(r0, 32).load(ROWS))
    P2, acc = warpgroup_mma_wait(0, deps=[P2, acc])
    gl.thread_barrier()
    dS_s.slice(0, 64).store(bf16(P2))
    gl.thread_barrier()
    for r0 in gl.static_range(0, 64, 32):
        r = gl.expand_dims(r0 + gl.arange(0, 32, ROW), 1)
        gl.store(P_ptr + (tile * 24576 + 16384) + (r * 128 + c), dS_s.slice(r0, 32).load(ROWS))
