"""The readable truth of the grouped weight gradient."""

from torch import Tensor


def add_weight_gradient_torch(into: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """into [E, out, in] += dy_e^T x_e over the rows of each expert, one product an expert."""
    first = 0
    for expert, last in enumerate(ends.tolist()):
        into[expert] += dy[first:last].to(into.dtype).T @ x[first:last].to(into.dtype)
        first = last
