"""Error feedback for MXFP4: round a column, push its error onto the columns that are still to be rounded.

GPTQ (Frantar et al., 2210.17323) with two changes that sparse experts and shared scales ask for: scales are fixed
before any weight moves, so that bytes stay comparable with round-to-nearest, and the Hessian of an expert that saw few
tokens is shrunk towards something known. With its own alone, an expert of few tokens gains nothing over rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3train.weights.mxfp4 import GROUP, code_values, exponent_value, inverse_scale, round_codes

OWN_HESSIAN_FACTOR = 4  # from this many tokens per input channel on, an expert's own statistics are enough
DAMPING = 0.01
BLOCK = 128


def second_moment(inputs: Tensor) -> Tensor:
    """Inputs [N, in] to their mean outer product [in, in] in float32 (float64 for float64 inputs)."""
    rows = inputs if inputs.dtype == torch.float64 else inputs.float()
    return rows.T @ rows / max(rows.shape[0], 1)


def shrunk_hessian(own: Tensor, tokens: int, pool: Tensor | None) -> Tensor:
    """H = a * own + (1 - a) * known with a = n / (n + in), for an expert that saw `tokens` = n tokens.

    `known` is the second moment of all tokens where the experts share their input space (w1 and w3), and the expert's
    own diagonal where they do not (w2: its input is the expert's own hidden basis). From 4 * in tokens on, own alone.
    """
    width = own.shape[0]
    if tokens >= OWN_HESSIAN_FACTOR * width:
        return own
    share = tokens / (tokens + width)
    known = torch.diag(torch.diagonal(own)) if pool is None else pool
    return share * own + (1 - share) * known


def feedback_codes(weight: Tensor, scale: Tensor, hessian: Tensor, *, damping: float = DAMPING) -> Tensor:
    """Codes uint8 [out, in] of `weight` [out, in] under the fixed scale bytes [out, in/32].

    Columns are rounded in order; `hessian` [in, in] is the second moment of the layer's inputs. Channels that no token
    excited are rounded without feedback. Raises torch.linalg.LinAlgError when the damped Hessian is not positive.
    """
    width = weight.shape[1]
    hessian = hessian.float().clone()
    diagonal = torch.diagonal(hessian)
    dead = diagonal <= 0
    diagonal += torch.where(dead, 1.0, damping * diagonal.mean())
    # Row i of the upper Cholesky factor of the inverse is what eliminating column i by the textbook would need.
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    work = weight.float().clone()
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = torch.empty_like(work[:, start:stop])
        for i in range(start, stop):
            byte = scale[:, i // GROUP]
            column = work[:, i]
            codes[:, i] = round_codes(column * inverse_scale(byte))
            value = code_values(codes[:, i]) * exponent_value(byte)
            error = (column - value) / factor[i, i]
            work[:, i:stop] -= torch.outer(error, factor[i, i:stop])
            errors[:, i - start] = error
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes


def output_error(weight: Tensor, value: Tensor, inputs: Tensor) -> tuple[float, float]:
    """(|W x|^2, |(Q - W) x|^2) summed over the rows of `inputs` [N, in]: output signal and noise of a matrix."""
    x = inputs.double()
    signal = (x @ weight.double().T).square().sum()
    noise = (x @ (value.double() - weight.double()).T).square().sum()
    return float(signal), float(noise)
