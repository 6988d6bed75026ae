"""Bad arguments of kda() are refused with a message that names the argument, the rule and the value."""

from typing import Any

import pytest
import torch

from k3kernels.kda import kda
from tests.kernels.helpers import kda_inputs

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of three dimensions": (
        {"q": torch.zeros(1, 8, 4)},
        ValueError,
        r"q: expected shape \[B, T, H, K\].*got \[1, 8, 4\]",
    ),
    "k of another length": (
        {"k": torch.zeros(1, 9, 2, 4)},
        ValueError,
        r"k: expected shape.*\[1, 8, 2, 4\], got \[1, 9",
    ),
    "v of a batch size of two": ({"v": torch.zeros(2, 8, 2, 4)}, ValueError, r"v: .*got \[2, 8, 2, 4\]"),
    "three value heads for two key heads": (
        {"v": torch.zeros(1, 8, 3, 4)},
        ValueError,
        r"v: its 3 heads.*multiple of the 2",
    ),
    "z without channels": ({"z": torch.zeros(1, 8, 2)}, ValueError, r"z: expected shape \[B, T, HV, K\]"),
    "beta with channels": ({"beta": torch.zeros(1, 8, 2, 4)}, ValueError, r"beta: expected shape \[B, T, HV\]"),
    "A_log padded": ({"A_log": torch.zeros(128)}, ValueError, r"A_log: expected shape \[HV\] = \[2\], got \[128\]"),
    "dt_bias flat": ({"dt_bias": torch.zeros(8)}, ValueError, r"dt_bias: expected shape \[HV, K\]"),
    "state V first": ({"initial_state": torch.zeros(1, 2, 6, 4)}, ValueError, r"initial_state: .*\[1, 2, 4, 6\]"),
    "integer q": (
        {"q": torch.zeros(1, 8, 2, 4, dtype=torch.int64)},
        TypeError,
        r"q: expected float32.*got torch.int64",
    ),
    "q a list": ({"q": [1.0]}, TypeError, r"q: expected a tensor \[B, T, H, K\], got list"),
    "z on another device": ({"z": torch.zeros(1, 8, 2, 4, device="meta")}, ValueError, r"z: expected on cpu.*got meta"),
    "bound of zero": ({"bound": 0.0}, ValueError, r"bound: expected a number in \[-5.9, 0\) or None.*got 0.0"),
    "bound of -6": ({"bound": -6}, ValueError, r"bound: .*got -6"),
    "bound a word": ({"bound": "none"}, TypeError, r"bound: .*got 'none'"),
    "bound not a number": ({"bound": float("nan")}, ValueError, r"bound: .*got nan"),
    "cu_seqlens a list": ({"cu_seqlens": [0, 8]}, TypeError, r"cu_seqlens: expected an integer tensor"),
    "cu_seqlens of floats": (
        {"cu_seqlens": torch.tensor([0.0, 8.0])},
        TypeError,
        r"cu_seqlens: expected int32 or int64",
    ),
    "cu_seqlens that starts late": (
        {"cu_seqlens": torch.tensor([1, 8])},
        ValueError,
        r"cu_seqlens: must start at 0.*got 1",
    ),
    "cu_seqlens that ends early": (
        {"cu_seqlens": torch.tensor([0, 7])},
        ValueError,
        r"cu_seqlens: .*end at T = 8, got 0 ... 7",
    ),
    "cu_seqlens that falls": (
        {"cu_seqlens": torch.tensor([0, 5, 3, 8])},
        ValueError,
        r"cu_seqlens: must not decrease, got 5 then 3 at index 2",
    ),
    "sizes that Triton lacks": (
        {"backend": "triton"},
        ValueError,
        r"backend: triton takes K and V in .*got K = 4, V = 6",
    ),
    "unknown backend": (
        {"backend": "cuda"},
        ValueError,
        r"backend: expected one of auto, naive, torch, triton, got 'cuda'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_refused(case: str) -> None:
    change, error, message = BAD[case]
    arguments: dict[str, Any] = kda_inputs(T=8, H=2, K=4, V=6)
    if "v" in change or "z" in change or "q" in change or "k" in change:
        arguments = kda_inputs(T=8, H=2, K=4, V=4)
    arguments = {name: x.float() for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        kda(**{**arguments, **change})


def test_cu_seqlens_with_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens: a packed stream has batch size 1, got B = 2"):
        kda(**kda_inputs(B=2, T=8), cu_seqlens=torch.tensor([0, 8]))


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError):
        kda(**kda_inputs(T=8), lower_bound=-5.0)  # type: ignore[call-arg]
