"""TP2, PP2 with virtual stages, EP2, CP2 and DP2 on two GPUs train what one GPU trains, within bf16's own noise."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu2


def loaded() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "layouts.py"
    spec = importlib.util.spec_from_file_location("layouts_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark() -> tuple[Any, dict[str, Any]]:
    module = loaded()
    result = module.measure()
    print(module.table(result))
    return module, result


@pytest.fixture(scope="module")
def exchanges() -> tuple[Any, dict[str, Any]]:
    module = loaded()
    result = module.measure(on_two=module.EXCHANGES)
    print(module.table(result))
    return module, result


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2 VPP2", "EP2", "CP2", "DP2"])
def test_losses_and_gradient_norms_agree_with_one_gpu(benchmark: tuple[Any, dict[str, Any]], layout: str) -> None:
    check(*benchmark, layout)


@pytest.mark.parametrize("exchange", ["EP2 sized", "EP2 slots", "EP2 slots captured", "EP2 slots overflowing"])
def test_experts_exchanged_over_nccl_train_what_one_gpu_trains(
    exchanges: tuple[Any, dict[str, Any]], exchange: str
) -> None:
    check(*exchanges, exchange)


def check(module: Any, result: dict[str, Any], layout: str) -> None:
    off = module.deviations(result)[layout]
    for key, noise in result["spread"].items():
        assert off[key] <= 4 * noise, (
            f"{layout}: {key} differ by {off[key]:.2e}, the order of addition alone by {noise:.2e}"
        )
