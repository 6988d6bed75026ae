"""Inputs, error measures and one runner shared by the kernel tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KDA_INPUTS = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial_state")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in L2; absolute where the expected norm is negligible."""
    difference = (actual.double() - expected.double()).norm().item()
    norm = expected.double().norm().item()
    return difference / norm if norm > 1e-6 else difference


def assert_close(
    actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], names: Sequence[str], tol: float
) -> None:
    """Every pair within the tolerance, finite; all failures are reported together."""
    failures = []
    for name, a, e in zip(names, actual, expected, strict=True):
        if a is None or e is None:
            if a is not e:
                failures.append(f"{name}: one of the two is missing")
            continue
        error = relative_error(a, e)
        if not error <= tol:  # also catches NaN
            failures.append(f"{name}: {error:.2e} > {tol:.0e}")
    assert not failures, "; ".join(failures)


def kda_inputs(
    B: int = 1,
    T: int = 40,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int = 16,
    documents: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random inputs of kda() under their argument names; initial states for B or `documents` sequences."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    HV = HV or H
    return {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "z": normal(B, T, HV, K),
        "beta": normal(B, T, HV),
        "A_log": normal(HV) * 0.5,
        "dt_bias": normal(HV, K),
        "initial_state": normal(documents or B, HV, K, V),
    }


def loss_weights(o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What `outputs_and_gradients` weighs the outputs with; bf16 numbers, so that every dtype has the same loss."""
    generator = torch.Generator().manual_seed(1)
    of_o, of_state = (torch.randn(x.shape, generator=generator, dtype=torch.float64).bfloat16() for x in (o, state))
    return of_o.to(o), of_state.to(state)


def outputs_and_gradients(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    **options: object,
) -> tuple[list[Tensor], list[str]]:
    """o, final state and the gradient of every input, for a loss that weighs all outputs randomly; and their names."""
    leaves = {name: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for name, x in inputs.items()}
    o, state = op(**leaves, output_final_state=True, **options)
    assert state is not None
    of_o, of_state = loss_weights(o, state)
    gradients = torch.autograd.grad((of_o * o).sum() + (of_state * state).sum(), list(leaves.values()))
    return [o, state, *gradients], ["o", "final_state", *(f"d{name}" for name in leaves)]
