"""`state.py` and `reverse.py` with explicit layouts and a hand-made pipeline, for K = 128 channels and bf16.

One chunk is a chain of three dependent products; everything else is hidden behind it: the next chunk's tiles are on
their way to shared memory, products off the chain run asynchronously, and finished tiles leave through shared memory
one pass later, while the tensor cores work.  The tiles that `prep.py` wrote, and those of full chunks that leave, move by
the bulk copy engine: one thread asks for a tile, and nobody computes addresses.  Rows of the caller's tensors, whose last
chunk may be short, move by 16-byte copies.  A program owns BV rows of S^T; 4 warps hold 64 of them.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper import bf16, fp32

FLAT = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def panel(x: Tensor, rows: int, columns: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of the bf16 matrix [rows, columns] that starts where x does."""
    return TensorDescriptor(x, [rows, columns], [columns, 1], [block_rows, block_columns], WIDE.value)


@gluon.jit
def _document(doc_ptr, seg, T, NT, VARLEN: gl.constexpr):
    """(sequence of the batch, first chunk, chunks, first row, end row)."""
    if VARLEN:
        p = doc_ptr + seg * 4
        return seg * 0, gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3)
    else:
        return seg, seg * NT, NT, seg * 0, T


@gluon.jit
def _barriers():
    """One per tile and buffer: the compiler would put a thread barrier between two uses of the same one."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    return bars


@gluon.jit
def _ask(QK, AM, rows, row, Qp_s, Kp_s, Kb_s, A_s, M_s, bq, bk, bb, ba, bm, s, live):
    """Ask for the five tiles that start at this row to arrive in buffers s.  QK holds Q+, K+ and Kb one after the other,
    AM holds A and M, `rows` rows each."""
    mbarrier.expect(bk.index(s), 16384, pred=live)
    mbarrier.expect(bm.index(s), 8192, pred=live)
    mbarrier.expect(bb.index(s), 16384, pred=live)
    mbarrier.expect(bq.index(s), 16384, pred=live)
    mbarrier.expect(ba.index(s), 8192, pred=live)
    tma.async_copy_global_to_shared(QK, [row + rows, 0], bk.index(s), Kp_s.index(s), pred=live)
    tma.async_copy_global_to_shared(AM, [row + rows, 0], bm.index(s), M_s.index(s), pred=live)
    tma.async_copy_global_to_shared(QK, [row + 2 * rows, 0], bb.index(s), Kb_s.index(s), pred=live)
    tma.async_copy_global_to_shared(QK, [row, 0], bq.index(s), Qp_s.index(s), pred=live)
    tma.async_copy_global_to_shared(AM, [row, 0], ba.index(s), A_s.index(s), pred=live)


@gluon.jit
def _arrived(bq, bk, bb, ba, bm, s, phase):
    mbarrier.wait(bk.index(s), phase)
    mbarrier.wait(bm.index(s), phase)
    mbarrier.wait(bb.index(s), phase)
    mbarrier.wait(bq.index(s), phase)
    mbarrier.wait(ba.index(s), phase)


@gluon.jit
def _fetch(stage, s, ptr, rows, cols, st, live):
    """Start copying a tile to buffer s; dead rows arrive as zeros."""
    async_copy.async_copy_global_to_shared(stage.index(s), ptr + (rows * st + cols), mask=live)


@gluon.jit(do_not_specialize=["T", "NT", "HV", "tile_rows"])
def state_hopper_kernel(
    v_ptr,
    doc_ptr,
    QK,
    AM,
    gam_ptr,
    row_ptr,
    S0_ptr,
    o_ptr,
    h,
    vn,
    ST_ptr,
    v_sb,
    v_st,
    v_sh,
    T,
    NT,
    HV,
    tile_rows,
    V: gl.constexpr,
    BV: gl.constexpr,
    HAS_S0: gl.constexpr,
    SAVE: gl.constexpr,
    FINAL: gl.constexpr,
    VARLEN: gl.constexpr,
    NW: gl.constexpr,
):
    K: gl.constexpr = 128
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 128, 16])
    CHUNK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, CHUNK, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    R128: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    R64: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    RV: gl.constexpr = R128 if BV == 128 else R64
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    hv = (pid // NV) % HV
    seg = pid // (NV * HV)
    b, cg0, chunks, row0, end = _document(doc_ptr, seg, T, NT, VARLEN)
    rows = end - row0
    tile = cg0 * HV + hv
    b64 = b.to(gl.int64)
    gam_ptr += tile.to(gl.int64) * K
    row_ptr += tile.to(gl.int64) * 512
    v_ptr += b64 * v_sb + row0.to(gl.int64) * v_st + hv.to(gl.int64) * v_sh + iv * BV
    o_ptr += ((b64 * T + row0 - 64) * HV + hv) * V + iv * BV  # one chunk behind, see the loop

    iV = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, RV)), 1)
    jV = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, RV)), 0)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    l128 = gl.arange(0, 128, LINE)
    l64 = gl.arange(0, 64, LINE)
    js = gl.arange(0, 128, gl.SliceLayout(0, STATE))

    sp = (seg.to(gl.int64) * HV + hv) * (K * V) + (
        gl.expand_dims(js, 0) * V + gl.expand_dims(iv * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
    )
    if HAS_S0:
        S = gl.load(S0_ptr + sp).to(gl.float32)
    else:
        S = gl.full([BV, K], 0.0, gl.float32, STATE)
    Kp_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    Qp_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    Kb_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE)
    M_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BV], WIDE)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [64, BV], WIDE)
    if SAVE:
        h_s = gl.allocate_shared_memory(gl.bfloat16, [BV, K], WIDE)
        vn_s = gl.allocate_shared_memory(gl.bfloat16, [64, BV], WIDE)
        h_s.store(bf16(S))
    gam_s = gl.allocate_shared_memory(gl.float32, [2, K], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    zero = gl.full([BV, 64], 0.0, gl.float32, CHUNK)
    some = chunks > 0
    bq = _barriers()
    bk = _barriers()
    bb = _barriers()
    ba = _barriers()
    bm = _barriers()
    _ask(QK, AM, tile_rows, tile * 64, Qp_s, Kp_s, Kb_s, A_s, M_s, bq, bk, bb, ba, bm, 0, some)
    _fetch(v_s, 0, v_ptr, iV, jV, v_st, iV < rows)
    async_copy.async_copy_global_to_shared(gam_s.index(0), gam_ptr + l128, mask=(l128 < 128) & some)
    async_copy.async_copy_global_to_shared(beta_s.index(0), row_ptr + l64, mask=(l64 < 64) & some)
    async_copy.commit_group()
    for c in range(chunks):
        s = c % 2
        async_copy.wait_group(0)
        _arrived(bq, bk, bb, ba, bm, s, (c // 2) & 1)
        fence_async_shared()
        gl.thread_barrier()
        left = gl.convert_layout(bf16(S), LEFT)
        R = warpgroup_mma(left, Kp_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        O = warpgroup_mma(left, Qp_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        more = c + 1 < chunks
        gam_ptr += HV * K
        row_ptr += HV * 512
        v_ptr += 64 * v_st
        _ask(QK, AM, tile_rows, (tile + HV) * 64, Qp_s, Kp_s, Kb_s, A_s, M_s, bq, bk, bb, ba, bm, 1 - s, more)
        _fetch(v_s, 1 - s, v_ptr, iV, jV, v_st, iV < rows - (c + 1) * 64)
        async_copy.async_copy_global_to_shared(gam_s.index(1 - s), gam_ptr + l128, mask=(l128 < 128) & more)
        async_copy.async_copy_global_to_shared(beta_s.index(1 - s), row_ptr + l64, mask=(l64 < 64) & more)
        async_copy.commit_group()
        # tiles that the end of the previous pass left in shared memory go out while the tensor cores work
        if SAVE:
            tma.async_copy_shared_to_global(h, [tile * V + iv * BV, 0], h_s)
            if c > 0:
                tma.async_copy_shared_to_global(vn, [(tile - HV) * 64, iv * BV], vn_s)
        gl.store(o_ptr + (iV * (HV * V) + jV), out_s.load(RV), mask=(iV < 64) & (c > 0))
        o_ptr += 64 * HV * V
        tile += HV
        vT = fp32(v_s.index(s).permute([1, 0]).load(CHUNK))
        beta = gl.expand_dims(beta_s.index(s).load(gl.SliceLayout(0, CHUNK)), 0)
        R, left = warpgroup_mma_wait(1, deps=[R, left])
        X = gl.convert_layout(bf16((vT - R) * beta), LEFT)
        Vn = warpgroup_mma(X, M_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        S = S * gl.expand_dims(gam_s.index(s).load(gl.SliceLayout(0, STATE)), 0)
        Vn, O, X = warpgroup_mma_wait(0, deps=[Vn, O, X])
        Vb = bf16(Vn)
        S = warpgroup_mma(gl.convert_layout(Vb, LEFT_S), Kb_s.index(s), S, is_async=True)
        O = warpgroup_mma(gl.convert_layout(Vb, LEFT), A_s.index(s).permute([1, 0]), O, is_async=True)
        tma.store_wait(0)
        gl.thread_barrier()
        if SAVE:
            vn_s.permute([1, 0]).store(Vb)
        S, O, Vb = warpgroup_mma_wait(0, deps=[S, O, Vb])
        if SAVE:
            h_s.store(bf16(S))
        out_s.permute([1, 0]).store(bf16(O))
    fence_async_shared()
    gl.thread_barrier()
    if SAVE:  # noqa: SIM102  (a static and a run-time condition)
        if some:
            tma.async_copy_shared_to_global(vn, [(tile - HV) * 64, iv * BV], vn_s)
    gl.store(o_ptr + (iV * (HV * V) + jV), out_s.load(RV), mask=(iV < rows - (chunks - 1) * 64) & some)
    async_copy.wait_group(0)
    if FINAL:
        gl.store(ST_ptr + sp, S)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "NT", "HV", "tile_rows"])
def reverse_hopper_kernel(
    do_ptr,
    doc_ptr,
    QK,
    AM,
    gam_ptr,
    row_ptr,
    dST_ptr,
    dS_desc,
    Y_desc,
    dS0_ptr,
    do_sb,
    do_st,
    do_sh,
    T,
    NT,
    HV,
    tile_rows,
    V: gl.constexpr,
    BV: gl.constexpr,
    HAS_DST: gl.constexpr,
    DS0: gl.constexpr,
    VARLEN: gl.constexpr,
    NW: gl.constexpr,
):
    K: gl.constexpr = 128
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 128, 16])
    CHUNK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, CHUNK, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    R128: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    R64: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    RV: gl.constexpr = R128 if BV == 128 else R64
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    hv = (pid // NV) % HV
    seg = pid // (NV * HV)
    b, cg0, chunks, row0, end = _document(doc_ptr, seg, T, NT, VARLEN)
    rows = end - row0
    last = chunks - 1
    tile = (cg0 + last) * HV + hv
    gam_ptr += tile.to(gl.int64) * K
    row_ptr += tile.to(gl.int64) * 512
    do_ptr += b.to(gl.int64) * do_sb + (row0 + last * 64).to(gl.int64) * do_st + hv.to(gl.int64) * do_sh + iv * BV

    iV = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, RV)), 1)
    jV = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, RV)), 0)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    l128 = gl.arange(0, 128, LINE)
    l64 = gl.arange(0, 64, LINE)
    js = gl.arange(0, 128, gl.SliceLayout(0, STATE))
    sp = (seg.to(gl.int64) * HV + hv) * (K * V) + (
        gl.expand_dims(js, 0) * V + gl.expand_dims(iv * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
    )
    if HAS_DST:
        dS = gl.load(dST_ptr + sp).to(gl.float32)
    else:
        dS = gl.full([BV, K], 0.0, gl.float32, STATE)
    Kp_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    Qp_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    Kb_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], WIDE)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE)
    M_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BV], WIDE)
    h_s = gl.allocate_shared_memory(gl.bfloat16, [BV, K], WIDE)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [64, BV], WIDE)
    h_s.store(bf16(dS))
    gam_s = gl.allocate_shared_memory(gl.float32, [2, K], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    zero = gl.full([BV, 64], 0.0, gl.float32, CHUNK)
    some = chunks > 0
    bq = _barriers()
    bk = _barriers()
    bb = _barriers()
    ba = _barriers()
    bm = _barriers()
    _ask(QK, AM, tile_rows, tile * 64, Qp_s, Kp_s, Kb_s, A_s, M_s, bq, bk, bb, ba, bm, 0, some)
    _fetch(do_s, 0, do_ptr, iV, jV, do_st, (iV < rows - last * 64) & some)
    async_copy.async_copy_global_to_shared(gam_s.index(0), gam_ptr + l128, mask=(l128 < 128) & some)
    async_copy.async_copy_global_to_shared(beta_s.index(0), row_ptr + l64, mask=(l64 < 64) & some)
    async_copy.commit_group()
    for c in range(chunks):
        s = c % 2
        async_copy.wait_group(0)
        _arrived(bq, bk, bb, ba, bm, s, (c // 2) & 1)
        fence_async_shared()
        gl.thread_barrier()
        doT = do_s.index(s).permute([1, 0])
        left = gl.convert_layout(bf16(dS), LEFT)
        dV = warpgroup_mma(left, Kb_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        dV = warpgroup_mma(doT, A_s.index(s), dV, is_async=True)
        more = c + 1 < chunks
        gam_ptr -= HV * K
        row_ptr -= HV * 512
        do_ptr -= 64 * do_st
        _ask(QK, AM, tile_rows, (tile - HV) * 64, Qp_s, Kp_s, Kb_s, A_s, M_s, bq, bk, bb, ba, bm, 1 - s, more)
        _fetch(do_s, 1 - s, do_ptr, iV, jV, do_st, (iV < 64) & more)
        async_copy.async_copy_global_to_shared(gam_s.index(1 - s), gam_ptr + l128, mask=(l128 < 128) & more)
        async_copy.async_copy_global_to_shared(beta_s.index(1 - s), row_ptr + l64, mask=(l64 < 64) & more)
        async_copy.commit_group()
        tma.async_copy_shared_to_global(dS_desc, [tile * V + iv * BV, 0], h_s)
        if c > 0:
            tma.async_copy_shared_to_global(Y_desc, [(tile + HV) * 64, iv * BV], y_s)
        tile -= HV
        dS = dS * gl.expand_dims(gam_s.index(s).load(gl.SliceLayout(0, STATE)), 0)
        dV, left = warpgroup_mma_wait(0, deps=[dV, left])
        dVb = gl.convert_layout(bf16(dV), LEFT)
        Y = warpgroup_mma(dVb, M_s.index(s), zero, use_acc=False, is_async=True)
        dS = warpgroup_mma(doT, Qp_s.index(s), dS, is_async=True)
        Y, dVb = warpgroup_mma_wait(1, deps=[Y, dVb])
        beta = gl.expand_dims(beta_s.index(s).load(gl.SliceLayout(0, CHUNK)), 0)
        bY = gl.convert_layout(bf16(Y * -beta), LEFT_S)
        dS = warpgroup_mma(bY, Kp_s.index(s), dS, is_async=True)
        tma.store_wait(0)
        gl.thread_barrier()
        y_s.permute([1, 0]).store(bf16(Y))
        dS, bY = warpgroup_mma_wait(0, deps=[dS, bY])
        h_s.store(bf16(dS))
    fence_async_shared()
    gl.thread_barrier()
    if some:
        tma.async_copy_shared_to_global(Y_desc, [(tile + HV) * 64, iv * BV], y_s)
    async_copy.wait_group(0)
    if DS0:
        gl.store(dS0_ptr + sp, dS)
    tma.store_wait(0)
