"""A small matrix as a picture, without matplotlib: cells, a diverging or sequential ramp, numbers on a margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

# Blue (starved) - near white (balanced) - red (overloaded), and one dark-blue ramp for plain amounts.
DIVERGING = ((33, 84, 143), (103, 160, 207), (246, 246, 244), (228, 134, 94), (165, 38, 42))
SEQUENTIAL = ((247, 248, 250), (189, 211, 232), (105, 163, 209), (38, 103, 166), (9, 46, 97))


def ramp(values_in_0_1: np.ndarray, stops: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Colours uint8 [..., 3] of values in [0, 1] along equally spaced stops."""
    at = np.linspace(0.0, 1.0, len(stops))
    table = np.asarray(stops, dtype=np.float64)
    channels = [np.interp(values_in_0_1, at, table[:, c]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def matrix_to_array(matrix: Sequence[Sequence[float]]) -> np.ndarray:
    """Rows of unequal length (early sublayers read fewer sources) as float64 [rows, longest], nan where absent."""
    width = max(len(row) for row in matrix)
    array = np.full((len(matrix), width), np.nan)
    for index, row in enumerate(matrix):
        array[index, : len(row)] = row
    return array


def heatmap_image(matrix: Sequence[Sequence[float]], *, centre: float | None = None) -> Image:
    """Draw [rows][columns] as an RGB picture.

    With `centre`, colours diverge around it, 0 to 2 x centre; without, they run from 0 to the largest value.
    Absent (nan) cells are light grey.
    """
    from PIL import Image as PILImage
    from PIL import ImageDraw

    array = matrix_to_array(matrix)
    rows, columns = array.shape
    top = 2.0 * centre if centre is not None else max(float(np.nanmax(array)), 1e-12)
    level = np.clip(np.nan_to_num(array / top), 0.0, 1.0)
    colours = ramp(level, DIVERGING if centre is not None else SEQUENTIAL)
    colours[np.isnan(array)] = (226, 226, 226)
    cell_w, cell_h = max(2, min(28, 960 // columns)), max(4, min(22, 720 // rows))
    picture = PILImage.fromarray(colours).resize((columns * cell_w, rows * cell_h), PILImage.Resampling.NEAREST)
    left, bottom = 34, 16
    canvas = PILImage.new("RGB", (picture.width + left + 8, picture.height + bottom + 4), "white")
    canvas.paste(picture, (left, 4))
    draw = ImageDraw.Draw(canvas)
    for row in range(0, rows, max(1, -(-12 // cell_h))):
        draw.text((left - 6, 4 + row * cell_h + cell_h / 2), str(row), fill=(90, 90, 90), anchor="rm")
    for column in range(0, columns, max(1, -(-28 // cell_w))):
        x = left + column * cell_w + cell_w / 2
        draw.text((x, picture.height + 6), str(column), fill=(90, 90, 90), anchor="mt")
    return canvas
