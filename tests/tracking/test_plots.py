from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3train.errors import DataError
from k3train.tracking.heatmap import heatmap_image
from k3train.tracking.plots import plot_expert_load, plot_loss, smooth
from tests.tracking.synthetic import records, write_run


def colours(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).astype(int)


def has_colour(path: Path, wanted: tuple[int, int, int], tolerance: int = 12) -> bool:
    return bool((np.abs(colours(path) - wanted).max(axis=1) <= tolerance).sum() > 20)


def test_the_loss_picture_holds_its_curve_its_validation_points_and_the_rate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records(60))
    path = plot_loss(run, unigram=6.3)
    assert path.name == "loss.png" and Image.open(path).size[0] >= 1200
    for wanted in [(0x1F, 0x6F, 0xB2), (0xD9, 0x62, 0x2B), (0x2F, 0x8F, 0x5B)]:
        assert has_colour(path, wanted)


def test_the_expert_load_picture_shows_imbalance_in_both_colours(tmp_path: Path) -> None:
    path = plot_expert_load(write_run(tmp_path / "run", records(30)))
    assert path.name == "expert_load.png"
    assert has_colour(path, (165, 38, 42)) and has_colour(path, (33, 84, 143), 40)


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "train/loss": 5.0}],
        [{"step": s, "train/loss": math.nan if s == 2 else 5.0} for s in range(1, 5)],
        [{"step": 1, "train/loss": 5.0, "train/lr": 0.0, "valid/loss": 5.1}],
    ],
    ids=["a single step", "a loss that was nan once", "a learning rate of zero"],
)
def test_an_odd_run_is_drawn_too(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    assert plot_loss(write_run(tmp_path / "run", rows)).stat().st_size > 10_000


def test_a_run_without_numbers_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "other": 1.0}])
    with pytest.raises(DataError, match="train/loss"):
        plot_loss(run)
    with pytest.raises(DataError, match="moe/load"):
        plot_expert_load(run)


def test_smoothing_keeps_a_constant_and_bridges_gaps() -> None:
    np.testing.assert_allclose(smooth([3.0, math.nan, 3.0, 3.0], 3), 3.0)
    falling = np.linspace(5, 1, 101)
    np.testing.assert_allclose(smooth(falling, 10)[40:60], falling[40:60], atol=1e-9)


def test_the_small_heatmap_paints_absent_cells_grey_and_balance_pale() -> None:
    image = heatmap_image([[1.0, 2.0], [0.0]], centre=1.0)
    pixels = {tuple(c) for c in np.asarray(image).reshape(-1, 3).tolist()}
    assert {(246, 246, 244), (165, 38, 42), (33, 84, 143), (226, 226, 226)} <= pixels
