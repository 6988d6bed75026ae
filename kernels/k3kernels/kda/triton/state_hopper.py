"""`state.py` and `reverse.py` with explicit layouts and a hand-made pipeline, for K = 128 channels and bf16.

One chunk is a chain of three dependent products; everything else is hidden behind it: the next chunk's tiles are on
their way to shared memory, products off the chain run asynchronously, and finished tiles leave through shared memory
(16-byte stores) one pass later, while the tensor cores work.  A program owns BV rows of S^T; 4 warps hold 64 of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper import bf16, fp32

FLAT = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _document(doc_ptr, seg, T, NT, VARLEN: gl.constexpr):
    """(sequence of the batch, first chunk, chunks, first row, end row)."""
    if VARLEN:
        p = doc_ptr + seg * 4
        return seg * 0, gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3)
    else:
        return seg, seg * NT, NT, seg * 0, T


@gluon.jit
def _fetch(stage, s, ptr, rows, cols, st, live):
    """Start copying a tile to buffer s; dead rows arrive as zeros."""
    async_copy.async_copy_global_to_shared(stage.index(s), ptr + (rows * st + cols), mask=live)


@gluon.jit(do_not_specialize=["T", "NT", "HV"])
def state_hopper_kernel(
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
    tile = cg0.to(gl.int64) * HV + hv
    b64 = b.to(gl.int64)
    Kp_ptr += tile * (64 * K)
    Qp_ptr += tile * (64 * K)
    Kb_ptr += tile * (64 * K)
    A_ptr += tile * 4096
    M_ptr += tile * 4096
    gam_ptr += tile * K
    row_ptr += tile * 512
    h_ptr += tile * (V * K) + iv * (BV * K)
    vn_ptr += (tile - HV) * (64 * V) + iv * BV  # this and o: one chunk behind, see the loop
    v_ptr += b64 * v_sb + row0.to(gl.int64) * v_st + hv.to(gl.int64) * v_sh + iv * BV
    o_ptr += ((b64 * T + row0 - 64) * HV + hv) * V + iv * BV

    i128 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, R128)), 1)
    j128 = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, R128)), 0)
    i64 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, R64)), 1)
    j64 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, R64)), 0)
    ib = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, R128)), 1)
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
    _fetch(Kp_s, 0, Kp_ptr, i128, j128, K, (i128 < 64) & some)
    _fetch(v_s, 0, v_ptr, iV, jV, v_st, iV < rows)
    _fetch(M_s, 0, M_ptr, i64, j64, 64, (i64 < 64) & some)
    _fetch(Kb_s, 0, Kb_ptr, i128, j128, K, (i128 < 64) & some)
    _fetch(Qp_s, 0, Qp_ptr, i128, j128, K, (i128 < 64) & some)
    _fetch(A_s, 0, A_ptr, i64, j64, 64, (i64 < 64) & some)
    async_copy.async_copy_global_to_shared(gam_s.index(0), gam_ptr + l128, mask=(l128 < 128) & some)
    async_copy.async_copy_global_to_shared(beta_s.index(0), row_ptr + l64, mask=(l64 < 64) & some)
    async_copy.commit_group()
    for c in range(chunks):
        s = c % 2
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        more = c + 1 < chunks
        Kp_ptr += HV * (64 * K)
        Qp_ptr += HV * (64 * K)
        Kb_ptr += HV * (64 * K)
        A_ptr += HV * 4096
        M_ptr += HV * 4096
        gam_ptr += HV * K
        row_ptr += HV * 512
        v_ptr += 64 * v_st
        _fetch(Kp_s, 1 - s, Kp_ptr, i128, j128, K, (i128 < 64) & more)
        _fetch(v_s, 1 - s, v_ptr, iV, jV, v_st, iV < rows - (c + 1) * 64)
        _fetch(M_s, 1 - s, M_ptr, i64, j64, 64, (i64 < 64) & more)
        _fetch(Kb_s, 1 - s, Kb_ptr, i128, j128, K, (i128 < 64) & more)
        _fetch(Qp_s, 1 - s, Qp_ptr, i128, j128, K, (i128 < 64) & more)
        _fetch(A_s, 1 - s, A_ptr, i64, j64, 64, (i64 < 64) & more)
        async_copy.async_copy_global_to_shared(gam_s.index(1 - s), gam_ptr + l128, mask=(l128 < 128) & more)
        async_copy.async_copy_global_to_shared(beta_s.index(1 - s), row_ptr + l64, mask=(l64 < 64) & more)
        async_copy.commit_group()

        left = gl.convert_layout(bf16(S), LEFT)
        R = warpgroup_mma(left, Kp_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        O = warpgroup_mma(left, Qp_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        # tiles that the end of the previous pass left in shared memory go out while the tensor cores work
        if SAVE:
            gl.store(h_ptr + (ib * K + j128), h_s.load(R128))
            gl.store(vn_ptr + (iV * V + jV), vn_s.load(RV), mask=(iV < 64) & (c > 0))
            h_ptr += HV * (V * K)
            vn_ptr += HV * (64 * V)
        gl.store(o_ptr + (iV * (HV * V) + jV), out_s.load(RV), mask=(iV < 64) & (c > 0))
        o_ptr += 64 * HV * V
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
        gl.thread_barrier()
        if SAVE:
            vn_s.permute([1, 0]).store(Vb)
        S, O, Vb = warpgroup_mma_wait(0, deps=[S, O, Vb])
        if SAVE:
            h_s.store(bf16(S))
        out_s.permute([1, 0]).store(bf16(O))
    gl.thread_barrier()
    if SAVE:
        gl.store(vn_ptr + (iV * V + jV), vn_s.load(RV), mask=(iV < 64) & some)
    gl.store(o_ptr + (iV * (HV * V) + jV), out_s.load(RV), mask=(iV < rows - (chunks - 1) * 64) & some)
    async_copy.wait_group(0)
    if FINAL:
        gl.store(ST_ptr + sp, S)


@gluon.jit(do_not_specialize=["T", "NT", "HV"])
def reverse_hopper_kernel(
    do_ptr,
    doc_ptr,
    Qp_ptr,
    Kp_ptr,
    Kb_ptr,
    A_ptr,
    M_ptr,
    gam_ptr,
    row_ptr,
    dST_ptr,
    dS_ptr,
    Y_ptr,
    dS0_ptr,
    do_sb,
    do_st,
    do_sh,
    T,
    NT,
    HV,
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
    tile = (cg0 + last).to(gl.int64) * HV + hv
    Kp_ptr += tile * (64 * K)
    Qp_ptr += tile * (64 * K)
    Kb_ptr += tile * (64 * K)
    A_ptr += tile * 4096
    M_ptr += tile * 4096
    gam_ptr += tile * K
    row_ptr += tile * 512
    dS_ptr += tile * (V * K) + iv * (BV * K)
    Y_ptr += (tile + HV) * (64 * V) + iv * BV  # one chunk behind, see the loop
    do_ptr += b.to(gl.int64) * do_sb + (row0 + last * 64).to(gl.int64) * do_st + hv.to(gl.int64) * do_sh + iv * BV

    i128 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, R128)), 1)
    j128 = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, R128)), 0)
    i64 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, R64)), 1)
    j64 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, R64)), 0)
    ib = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, R128)), 1)
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
    _fetch(Kb_s, 0, Kb_ptr, i128, j128, K, (i128 < 64) & some)
    _fetch(do_s, 0, do_ptr, iV, jV, do_st, (iV < rows - last * 64) & some)
    _fetch(A_s, 0, A_ptr, i64, j64, 64, (i64 < 64) & some)
    _fetch(M_s, 0, M_ptr, i64, j64, 64, (i64 < 64) & some)
    _fetch(Qp_s, 0, Qp_ptr, i128, j128, K, (i128 < 64) & some)
    _fetch(Kp_s, 0, Kp_ptr, i128, j128, K, (i128 < 64) & some)
    async_copy.async_copy_global_to_shared(gam_s.index(0), gam_ptr + l128, mask=(l128 < 128) & some)
    async_copy.async_copy_global_to_shared(beta_s.index(0), row_ptr + l64, mask=(l64 < 64) & some)
    async_copy.commit_group()
    for c in range(chunks):
        s = c % 2
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        more = c + 1 < chunks
        Kp_ptr -= HV * (64 * K)
        Qp_ptr -= HV * (64 * K)
        Kb_ptr -= HV * (64 * K)
        A_ptr -= HV * 4096
        M_ptr -= HV * 4096
        gam_ptr -= HV * K
        row_ptr -= HV * 512
        do_ptr -= 64 * do_st
        _fetch(Kb_s, 1 - s, Kb_ptr, i128, j128, K, (i128 < 64) & more)
        _fetch(do_s, 1 - s, do_ptr, iV, jV, do_st, (iV < 64) & more)
        _fetch(A_s, 1 - s, A_ptr, i64, j64, 64, (i64 < 64) & more)
        _fetch(M_s, 1 - s, M_ptr, i64, j64, 64, (i64 < 64) & more)
        _fetch(Qp_s, 1 - s, Qp_ptr, i128, j128, K, (i128 < 64) & more)
        _fetch(Kp_s, 1 - s, Kp_ptr, i128, j128, K, (i128 < 64) & more)
        async_copy.async_copy_global_to_shared(gam_s.index(1 - s), gam_ptr + l128, mask=(l128 < 128) & more)
        async_copy.async_copy_global_to_shared(beta_s.index(1 - s), row_ptr + l64, mask=(l64 < 64) & more)
        async_copy.commit_group()

        doT = do_s.index(s).permute([1, 0])
        left = gl.convert_layout(bf16(dS), LEFT)
        dV = warpgroup_mma(left, Kb_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        dV = warpgroup_mma(doT, A_s.index(s), dV, is_async=True)
        gl.store(dS_ptr + (ib * K + j128), h_s.load(R128))
        gl.store(Y_ptr + (iV * V + jV), y_s.load(RV), mask=(iV < 64) & (c > 0))
        dS_ptr -= HV * (V * K)
        Y_ptr -= HV * (64 * V)
        dS = dS * gl.expand_dims(gam_s.index(s).load(gl.SliceLayout(0, STATE)), 0)
        dV, left = warpgroup_mma_wait(0, deps=[dV, left])
        dVb = gl.convert_layout(bf16(dV), LEFT)
        Y = warpgroup_mma(dVb, M_s.index(s), zero, use_acc=False, is_async=True)
        dS = warpgroup_mma(doT, Qp_s.index(s), dS, is_async=True)
        Y, dVb = warpgroup_mma_wait(1, deps=[Y, dVb])
        beta = gl.expand_dims(beta_s.index(s).load(gl.SliceLayout(0, CHUNK)), 0)
        bY = gl.convert_layout(bf16(Y * -beta), LEFT_S)
        dS = warpgroup_mma(bY, Kp_s.index(s), dS, is_async=True)
        gl.thread_barrier()
        y_s.permute([1, 0]).store(bf16(Y))
        dS, bY = warpgroup_mma_wait(0, deps=[dS, bY])
        h_s.store(bf16(dS))
    gl.thread_barrier()
    gl.store(Y_ptr + (iV * V + jV), y_s.load(RV), mask=(iV < 64) & some)
    async_copy.wait_group(0)
    if DS0:
        gl.store(dS0_ptr + sp, dS)
