"""Shared fixtures: the CPU adapter before any megatron import, a one-rank process group, the golden folder."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a small machine
if (os.cpu_count() or 1) <= 4:  # tensors of the tests are too small to be worth a thread; processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, by whichever test comes first: without a GPU its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

from k3train.platform import cpu

cpu.install()

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip by themselves where there are not enough devices."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(marker) and devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {devices} here"))


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Process groups of a single process; yields the layout."""
    import torch.distributed as dist

    from k3train.parallel import layout
    from k3train.platform import install_adam

    install_adam()
    if not dist.is_initialized():
        store = tmp_path_factory.mktemp("store") / "file"
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    return layout.initialize(layout.Sizes())
