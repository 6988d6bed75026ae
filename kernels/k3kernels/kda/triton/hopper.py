"""Instructions that the kernels with explicit layouts share (Hopper; never reached by the interpreter)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
FLOOR2 = gl.constexpr(-24.0)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rcp(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gate_sigmoid(z, rate, bias):
    """sigmoid(rate * (z + bias)) with one multiply-add in front of the exponential."""
    return rcp(1.0 + exp2(z * (rate * -LOG2E) + bias * (rate * -LOG2E)))


@gluon.jit
def bf16(x):
    """Round to bf16, two neighbours of a thread per instruction (the compiler's own conversion goes one by one)."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def fp32(x):
    """bf16 to fp32, two neighbours at once."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
        "=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def log2_decay(z, rate, bias, bound, BOUNDED: gl.constexpr):
    """As in common.py, from z and dt_bias."""
    if BOUNDED:
        return (bound * LOG2E) * gate_sigmoid(z, rate, bias)
    else:
        x = z + bias
        t = exp2(gl.abs(x) * -LOG2E)
        small = t * (LOG2E * (1.0 - t * (0.5 - t * 0.33333333)))
        big = gl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + t], dtype=gl.float32, is_pure=True, pack=1
        )
        return gl.maximum(-rate * (gl.maximum(x, 0.0) * LOG2E + gl.where(t < 0.01, small, big)), FLOOR2)
