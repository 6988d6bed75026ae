"""The grouped weight gradient: Triton against one product an expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3kernels.grouped import add_weight_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = {"some without rows": [0, 1, 70, 0, 33, 64], "the last without rows": [5, 0, 0], "one": [40], "none": [0, 0]}


def inputs(counts: list[int], out: int, inner: int, dtype: torch.dtype) -> dict[str, Any]:
    g = torch.Generator(DEVICE).manual_seed(0)
    rows = sum(counts)
    dy, x = (torch.randn(rows, n, device=DEVICE, generator=g).to(dtype) for n in (out, inner))
    into = torch.randn(len(counts), out, inner, device=DEVICE, generator=g)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    return {"into": into, "dy": dy, "x": x, "ends": ends}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("out", "inner"), [(32, 48), (144, 130)], ids=["inside a tile", "over tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_adds_the_products_of_each_experts_rows(
    counts: list[int], out: int, inner: int, dtype: torch.dtype
) -> None:
    given = inputs(counts, out, inner, dtype)
    want = given["into"].double()
    first = 0
    for expert, last in enumerate(given["ends"].tolist()):
        want[expert] += given["dy"][first:last].double().T @ given["x"][first:last].double()
        first = last
    # the interpreter has no product of bf16 matrices
    for backend in ("torch", "triton") if DEVICE == "cuda" or dtype == torch.float32 else ("torch",):
        into = given["into"].clone()
        add_weight_gradient(into, given["dy"], given["x"], given["ends"], backend=backend)
        assert float((into.double() - want).abs().max() / want.abs().max()) < 1e-5, backend
        for expert, count in enumerate(counts):
            if count == 0:
                assert torch.equal(into[expert], given["into"][expert]), "an expert without rows was touched"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("into", lambda t: t.bfloat16(), "float32"),
        ("x", lambda t: t.float(), "like dy"),
        ("ends", lambda t: t.long(), "int32"),
        ("ends", lambda t: t[:-1], "ends"),
        ("dy", lambda t: t.T.contiguous().T, "contiguous"),
        ("dy", lambda t: t[:, :-1], "dy"),
    ],
    ids=["into in bf16", "x of another dtype", "ends in int64", "ends too short", "dy strided", "dy too narrow"],
)
def test_arguments_that_break_a_rule_are_named(name: str, change: Any, words: str) -> None:
    given = inputs([3, 4], 32, 16, torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=words):
        add_weight_gradient(**{**given, name: change(given[name])})


@pytest.mark.gpu
def test_the_kernel_never_waits_for_the_device() -> None:
    given = inputs([0, 300, 20, 704], 768, 896, torch.bfloat16)
    add_weight_gradient(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_weight_gradient(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
