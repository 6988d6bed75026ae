"""How far KDA's providers are from the recurrence in fp64, in bf16, on inputs that are hard for chunked kernels.

`python benchmarks/kda.py --errors` prints this table after its times.  Errors are |found - exact| / |exact| in L2
over a whole tensor.  In `one decay` the slope of the gate is one number, so that dz errs as the gradient of g itself does,
which is a difference of large sums when every gate is near its bound.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from k3kernels.kda import kda

PARTS = ("q", "k", "v", "z", "beta", "A_log", "dt_bias")
BOUND = -5.0
Call = Callable[[dict[str, Tensor], Tensor | None], tuple[Tensor, list[Tensor]]]


def cases(device: str, T: int, H: int, K: int) -> dict[str, dict[str, Tensor]]:
    """Case -> inputs of a provider and the output's gradient `do`, bf16 but for the parameters."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x = {name: normal(1, T, H, K) for name in ("q", "k", "v", "z", "do")} | {"beta": normal(1, T, H)}
    shared = {"A_log": 0.5 * normal(H), "dt_bias": normal(H, K)}
    flat = {name: torch.zeros_like(t) for name, t in shared.items()}
    same = x["k"][:, :1]
    found = {
        "random": x | shared,
        "one decay of -4.99 everywhere": x | flat | {"z": torch.full_like(x["z"], 6.0)},
        "open gates": x | shared | {"z": x["z"] - 6},
        "repeated keys, beta near 1": x
        | shared
        | {"k": same + 0.3 * x["k"], "beta": 0.3 * x["beta"] + 4, "z": x["z"] - 7},
    }
    return {case: {n: t if n in shared else t.bfloat16() for n, t in inputs.items()} for case, inputs in found.items()}


def results(call: Call, x: dict[str, Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """o and the gradient of every part, in fp64."""
    leaves = {n: (x[n] if dtype is None else x[n].to(dtype)).detach().requires_grad_() for n in PARTS}
    o, by = call(leaves, None)
    return [t.double() for t in (o, *torch.autograd.grad(o, by, x["do"].to(o.dtype)))]


def exact(x: dict[str, Tensor], _: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    leaves = [x[n] for n in PARTS]
    return kda(*leaves, bound=BOUND, backend="torch")[0], leaves


def errors(
    calls: dict[str, Call], device: str, T: int = 1000, H: int = 4, K: int = 128
) -> dict[str, dict[str, list[float]]]:
    """Case -> provider -> errors of o and of the gradient of every part."""
    table: dict[str, dict[str, list[float]]] = {}
    for case, x in cases(device, T, H, K).items():
        expected = results(exact, x, torch.float64)
        row = table[case] = {}
        for name, call in calls.items():
            pairs = zip(results(call, x), expected)
            row[name] = [((a - e.view_as(a)).norm() / e.norm()).item() for a, e in pairs]
    return table


def print_errors(table: dict[str, dict[str, list[float]]]) -> None:
    names = ("o", *(f"d{part}" for part in PARTS))
    print(f"{'error to fp64':31} {'provider':14} " + " ".join(f"{name:>9}" for name in names))
    for case, row in table.items():
        for provider, values in row.items():
            print(f"{case:31} {provider:14} " + " ".join(f"{value:9.1e}" for value in values), flush=True)
