"""`k3train report RUN...`: one self-contained HTML page about one or several runs, from their `metrics.jsonl` alone.

The page is hand-written HTML, CSS and JavaScript (`report_page/`) with the data inside; it opens from disk, asks no
network for anything, and stays under `PAGE_LIMIT` bytes however long the runs were.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

from k3train.errors import DataError
from k3train.tracking.report_data import Budget, run_data

PAGE_LIMIT = 5_000_000
_PAGE = Path(__file__).parent / "report_page"


def _unique_names(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out


def render_report(run_dirs: Sequence[str | os.PathLike[str]], title: str | None = None) -> str:
    """The page's text for these run folders.

    Raises:
        DataError: no folder was given, one holds no metrics, or so many that even a coarse page passes the limit.
    """
    if not run_dirs:
        raise DataError("k3train report needs at least one run folder, such as runs/k3_tiny")
    budget = Budget(heat_bytes=900_000 // len(run_dirs))
    while True:
        runs = [run_data(folder, budget) for folder in run_dirs]
        for run, name in zip(runs, _unique_names([run["name"] for run in runs])):
            run["name"] = name
        page = _fill(runs, title or (runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"))
        if len(page.encode()) < PAGE_LIMIT:
            return page
        if budget.buckets < 60:
            raise DataError(f"{len(run_dirs)} runs do not fit one page of {PAGE_LIMIT:,} bytes; give fewer of them")
        budget = Budget(budget.buckets // 2, budget.heat_bytes // 2, max(budget.frames // 2, 2))


def _fill(runs: list[dict], title: str) -> str:
    # "</" and "<!--" inside a script element would end or hide it
    data = json.dumps({"title": title, "runs": runs}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "<!--TITLE-->": html.escape(title),
        "/*STYLE*/": (_PAGE / "page.css").read_text(),
        "/*DATA*/": data,
        "/*SCRIPT*/": (_PAGE / "chart.js").read_text() + (_PAGE / "page.js").read_text(),
    }
    page = (_PAGE / "page.html").read_text()
    for mark, content in parts.items():
        before, _, after = page.partition(mark)
        page = before + content + after
    return page


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None, title: str | None = None
) -> Path:
    """Write the page; by default `report.html` in the run folder, or in the working directory for several runs."""
    page = render_report(run_dirs, title)
    first = Path(run_dirs[0])
    home = (first if first.is_dir() else first.parent) if len(run_dirs) == 1 else Path()
    path = Path(output) if output is not None else home / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(page)
    beside.replace(path)
    return path
