"""The grouped linear for few rows: every expert has its own programs, which find their rows from the counts.

At a few rows the time is that of reading the weights of the experts that have any, and of launching: this is one kernel,
and programs of experts without rows end at once. A tile computes y^T = W x^T, the weight on the long side.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its bfloat16 products are wrong


@triton.jit
def few_rows_kernel(
    x_ptr, w_ptr, counts_ptr, y_ptr, experts, outputs,
    K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / BN), E). x [N, K], w [E, outputs, K], y [N, outputs], all contiguous."""
    expert = tl.program_id(1)
    index = tl.arange(0, BE)
    counts = tl.load(counts_ptr + index, mask=index < experts, other=0).to(tl.int32)
    first = tl.sum(tl.where(index < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(index == expert, counts, 0), 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < outputs
    k = tl.arange(0, BK)
    w_at = w_ptr + (tl.cast(expert, tl.int64) * outputs + n)[:, None] * K + k[None, :]
    for start in range(first, end, BM):
        m = start + tl.arange(0, BM)
        in_m = m < end
        x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        for at in range(0, K, BK):
            in_k = at + k < K
            w = tl.load(w_at + at, mask=in_n[:, None] & in_k[None, :], other=0.0)
            x = tl.load(x_at + at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            if WIDE:
                w, x = w.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        y_at = y_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(y_at, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def few_rows_triton(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`k3kernels.few_rows.few_rows_linear` on Triton; arguments already checked."""
    x, weight, counts = x.contiguous(), weight.contiguous(), counts.contiguous()
    experts, outputs, width = weight.shape
    y = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    exact = x.dtype == torch.float32
    few_rows_kernel[(triton.cdiv(outputs, 64), experts)](
        x, weight, counts, y, experts, outputs,
        K=width, BE=triton.next_power_of_2(experts), BM=16, BN=64, BK=32 if exact else 128, WIDE=INTERPRETED,
        num_warps=4, num_stages=2 if exact else 4,
    )  # fmt: skip
    return y
