"""What every KDA kernel shares: the gate, the chunk table, and the small constant matrices.

Conventions of all kernels in this folder
  chunk     64 tokens of one document, always two halves of 32; a document's last chunk may be short
  cg        index of a chunk over the whole batch; tile = cg * HV + hv indexes every per-chunk buffer
  log2      decays live in log2 units inside the kernels (exp2 is the hardware's exponential)
  BS        block of an in-chunk product that is anchored in its middle: 32, 16 or 8 tokens.  The factors of a block
            span BS/2 tokens of decay on either side, so BS follows from the strongest decay per token: 32 holds
            |g| <= 5.4 and 16 holds 10.9 in natural units (bf16 reaches 2^126), 8 holds the unbounded gate's cut.
            fp32 takes 16 or 8: its products are three tf32 terms, of which the small ones need another 2^22 of range.
            Pairs that lie in one half but not in one block are formed level by level (dyadic anchors): the anchor sits
            between the two, every exponent is <= 0, and nothing can overflow whatever the gate is.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The unbounded gate is cut at 2^-24 per token (-16.6 natural units): fp32's resolution of a sum that holds 1.
FLOOR2 = tl.constexpr(-24.0)


@triton.jit
def sigmoid(x):
    """x [...] fp32 in natural units; saturates to exactly 0 and 1 without NaN for any finite or infinite x."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def decay_rate(A_log):
    """exp(A_log), held below 1e30 so that 0 * rate stays 0 in the gate's gradient."""
    return tl.exp2(tl.minimum(A_log * LOG2E, 99.0))


@triton.jit
def log2_decay(x, rate, bound, BOUNDED: tl.constexpr):
    """Gate: bound*sigmoid(rate*x), or -rate*softplus(x) cut at FLOOR2; x = z + dt_bias; log2 units."""
    if BOUNDED:
        return (bound * LOG2E) * sigmoid(rate * x)
    else:
        t = tl.exp2(tl.abs(x) * -LOG2E)
        small = t * (LOG2E * (1.0 - t * (0.5 - t * 0.33333333)))  # log2(1+t) without cancellation
        soft = tl.maximum(x, 0.0) * LOG2E + tl.where(t < 0.01, small, tl.log2(1.0 + t))
        return tl.maximum(-rate * soft, FLOOR2)


@triton.jit
def gate_gradient(dg, x, rate, bound, BOUNDED: tl.constexpr):
    """(dz, contribution to dA_log) for the gradient dg of the natural log decay."""
    if BOUNDED:
        s = sigmoid(rate * x)
        dz = dg * (bound * s) * (1.0 - s) * rate
        return dz, dz * x
    else:
        g2 = log2_decay(x, rate, bound, False)
        live = g2 > FLOOR2
        dz = tl.where(live, -dg * rate * sigmoid(x), 0.0)
        return dz, tl.where(live, dg * g2 * (1.0 / LOG2E), 0.0)


@triton.jit
def chunk_rows(table_ptr, cg, T, NT, VARLEN: tl.constexpr):
    """(sequence of the batch, first row, number of rows) of chunk cg; no rows where a stream's chunk is unused."""
    if VARLEN:
        return 0, tl.load(table_ptr + cg * 2), tl.load(table_ptr + cg * 2 + 1)
    else:
        c = cg % NT
        return cg // NT, c * 64, tl.minimum(T - c * 64, 64)


@triton.jit
def block_start(i, B: tl.constexpr):
    return (i // B) * B


@triton.jit
def dot(a, b, acc, IP: tl.constexpr):
    return tl.dot(a, b, acc, input_precision=IP)


@triton.jit
def split(x, HT: tl.constexpr):
    """x fp32 = hi + lo in HT: two tensor-core terms that keep 16 (bf16) or 22 (fp16) bits."""
    hi = x.to(HT)
    return hi, (x - hi.to(tl.float32)).to(HT)


@triton.jit
def map_rows(C, hi, lo, IP: tl.constexpr):
    """C @ (hi + lo): a cumulative sum over the rows (tokens) as a product with a small-integer matrix."""
    m = C.to(hi.dtype)
    if hi.dtype == tl.float32:
        return tl.dot(m, hi, input_precision=IP)
    else:
        return tl.dot(m, lo, tl.dot(m, hi))


@triton.jit
def map_cols(hi, lo, C, IP: tl.constexpr):
    """(hi + lo) @ C: the same over the columns."""
    m = C.to(hi.dtype)
    if hi.dtype == tl.float32:
        return tl.dot(hi, m, input_precision=IP)
    else:
        return tl.dot(lo, m, tl.dot(hi, m))


@triton.jit
def anchored(i, j, B: tl.constexpr):
    """Coefficient of token j in D_i = G_i - G(middle of i's block of B tokens): -1, 0 or 1."""
    return tl.where(j <= i, 1.0, 0.0) - tl.where(j < block_start(i, B) + B // 2, 1.0, 0.0)
