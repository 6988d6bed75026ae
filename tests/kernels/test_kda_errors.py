"""The table of errors that benchmarks/kda.py prints, on a CPU with the torch path in the place of kernels."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3kernels.kda import kda

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
kda_errors = pytest.importorskip("kda_errors")


def chunks(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    leaves = [x[n] for n in kda_errors.PARTS]
    return kda(*leaves, bound=kda_errors.BOUND, cu_seqlens=cu, backend="torch")[0], leaves


def without_decay(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    leaves = [x[n] for n in kda_errors.PARTS]
    q, k, v, z, *rest = leaves
    return kda(q, k, v, 0 * z - 20, *rest, bound=kda_errors.BOUND, cu_seqlens=cu, backend="torch")[0], leaves


def test_errors_are_those_of_the_output_s_rounding_or_of_a_wrong_function(capsys: pytest.CaptureFixture[str]) -> None:
    table = kda_errors.errors({"right": chunks, "wrong": without_decay}, "cpu", T=70, H=1, K=32)
    assert len(table) == 4
    for case, row in table.items():
        for name, error in zip(("o", *kda_errors.PARTS), row["right"]):
            assert error < 4e-3, (case, name)  # fp32 inside, so one rounding to bf16
    assert table["random"]["wrong"][0] > 0.1
    kda_errors.print_errors(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 * 2
    assert "dt_bias" in lines[0]


def test_one_decay_everywhere_is_near_the_bound() -> None:
    x = kda_errors.cases("cpu", T=70, H=1, K=32)["one decay of -4.99 everywhere"]
    g = kda_errors.BOUND * torch.sigmoid(x["A_log"].exp() * x["z"].float())
    assert g.min() == g.max()
    assert -5.0 < g.max().item() < -4.98
