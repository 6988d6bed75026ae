"""Closed-form parameter counts against the published totals and against the model itself."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from k3train.config.compose import compose
from k3train.config.schema import Config
from k3train.planning.parameters import count


@functools.cache
def config_of(*overrides: str) -> Config:
    return compose(list(overrides))


def test_k3_has_the_published_size() -> None:
    parts = count(config_of("model=k3").model)
    assert parts.total == 2_779_484_476_000
    assert round(parts.total / 1e9, 2) == 2779.48
    assert round(parts.active / 1e9, 2) == 104.19


def test_k3_parts_match_the_breakdown_of_the_released_headers() -> None:
    parts = count(config_of("model=k3").model)
    billions = {name: round(value / 1e9, 2) for name, value in parts.by_part().items()}
    assert billions["routed_experts"] == 2722.74
    assert billions["linear_mixers"] == 30.62
    assert billions["full_attention"] == 5.57
    assert billions["shared_experts"] == 12.16
    assert billions["latent"] == 4.73
    assert billions["dense"] == 0.73
    assert billions["routers"] == 0.59
    assert round((parts.embedding + parts.head) / 1e9, 2) == 2.35


def test_kimi_linear_has_the_published_size() -> None:
    assert count(config_of("model=kimi_linear_48b").model).total == 49_122_681_728


def test_proxy_is_about_what_it_says() -> None:
    parts = count(config_of("model=k3_proxy").model)
    assert round(parts.total / 1e9, 1) == 3.8
    assert round(parts.active / 1e9, 2) == 0.67


def test_tiny_stays_tiny() -> None:
    assert 1e6 < count(config_of().model).total < 4e6


@pytest.mark.parametrize("model", ["k3", "kimi_linear_48b", "k3_proxy", "k3_tiny"])
def test_parts_add_up(model: str) -> None:
    parts = count(config_of(f"model={model}").model)
    assert sum(parts.by_part().values()) == parts.total
    assert parts.active < parts.total


PROGRAM = """
import sys
from k3train import platform
platform.install()
import torch
from k3train.config.compose import compose
from k3train.model.build import build_meta
from k3train.parallel import layout
from k3train.planning.parameters import count
from k3train import launch
launch.init_distributed(compose())
here = layout.initialize(layout.sizes_from_config(compose().parallel, 1))
for words in CASES:
    model = compose(words).model
    counted = count(model)
    built = build_meta(model, here)
    total = sum(t.numel() for t in [*built.parameters(), *built.buffers()])
    assert all(t.device.type == "meta" for t in built.parameters())
    print(words, total, counted.total, flush=True)
    if total != counted.total:
        sys.exit(f"{words}: the model holds {total}, the closed form says {counted.total}")
"""

CASES = [
    ["model=k3"],
    ["model=kimi_linear_48b"],
    ["model=k3_proxy"],
    ["model=k3_tiny"],
    ["model=k3_tiny", "model.attention_residuals=off"],
    ["model=k3_tiny", "model.attention_residuals=full", "model.hybrid=none"],
    ["model=k3_tiny", "model.kda.output_gate=low_rank", "model.mla.output_gate=false"],
    ["model=k3_tiny", "model.moe.latent=null", "model.moe.latent_norm=false"],
]


def test_closed_form_equals_the_model_on_the_meta_device() -> None:
    program = f"CASES = {CASES!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
