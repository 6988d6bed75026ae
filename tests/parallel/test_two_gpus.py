"""TP2, PP2 with virtual stages, EP2, CP2 and DP2 on two GPUs train what one GPU trains, within bf16's own noise; captured
as CUDA graphs they train what they train when Python launches them; and a step's schedule never waits for the device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu2

EAGER = ["TP2+SP", "PP2 VPP2", "EP2", "CP2", "DP2"]
CAPTURED = {
    "DP2 captured": "DP2",
    "DP2 captured, reduced during the backward": "DP2",
    "PP2 VPP2 captured": "PP2 VPP2",
    "PP2 captured": "PP2 VPP2",
    "TP2+SP captured": "TP2+SP",
    "CP2 captured": "CP2",
}


def load() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "layouts.py"
    spec = importlib.util.spec_from_file_location("layouts_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured() -> tuple[Any, dict[str, Any]]:
    module = load()
    result = module.measure()
    print(module.table(result))
    return module, result


def of(result: dict[str, Any], layout: str) -> dict[str, Any]:
    """What was seen of a layout; fails with the ranks' output where it did not come to its end."""
    assert layout in result["layouts"], result["failed"]
    return result["layouts"][layout]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exchanges() -> tuple[Any, dict[str, Any]]:
    module = load()
    result = module.measure(on_two=module.EXCHANGES)
    print(module.table(result))
    return module, result


def check(module: Any, result: dict[str, Any], layout: str, other: dict[str, Any]) -> None:
    off = module.distance(of(result, layout), other)
    print(f"{layout}: {off}")
    for key, limit in result["limits"].items():
        assert off[key] <= limit, (
            f"{layout}: {key} differ by {off[key]:.2e}, the order of addition alone by {result['spread'][key]:.2e}"
        )


@pytest.mark.parametrize("layout", [*EAGER, *CAPTURED])
def test_losses_and_gradient_norms_agree_with_one_gpu(measured: tuple[Any, dict[str, Any]], layout: str) -> None:
    module, result = measured
    check(module, result, layout, result["one"])


@pytest.mark.parametrize("layout", CAPTURED)
def test_a_captured_step_is_the_step_that_python_launches(measured: tuple[Any, dict[str, Any]], layout: str) -> None:
    module, result = measured
    assert of(result, layout)["graphs"] == 1
    check(module, result, layout, of(result, CAPTURED[layout]))


@pytest.mark.parametrize("layout", [name for name in EAGER if name != "EP2"])
def test_a_schedule_never_waits_for_the_device(measured: tuple[Any, dict[str, Any]], layout: str) -> None:
    """EP2's exchange reads its sizes on the host."""
    assert of(measured[1], layout)["waits"] == []


@pytest.mark.parametrize("exchange", ["EP2 sized", "EP2 slots", "EP2 slots captured", "EP2 slots overflowing"])
def test_experts_exchanged_over_nccl_train_what_one_gpu_trains(
    exchanges: tuple[Any, dict[str, Any]], exchange: str
) -> None:
    module, result = exchanges
    check(module, result, exchange, result["one"])
