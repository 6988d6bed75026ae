from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from k3train.errors import DataError
from k3train.tracking.commands import run_report
from k3train.tracking.jsonl import encode_line
from k3train.tracking.report import PAGE_LIMIT, render_report, write_report
from k3train.tracking.report_data import FrameKeeper, bucketed, run_data
from tests.tracking.synthetic import records, write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match.group(1))


def test_the_page_holds_the_runs_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, records(50, seed=i)) for i, name in enumerate(("a", "b"))]
    said: list[str] = []
    path = run_report(runs, tmp_path / "out" / "r.html", say=said.append)
    page = path.read_text()
    assert "open it" in said[0]
    assert [run["name"] for run in page_data(page)["runs"]] == ["a", "b"]
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|url\(|fetch\(|XMLHttp|import\(""", page)
    addresses = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "only the name of the SVG language, which is never fetched"


def test_one_run_gets_its_report_into_its_own_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records(10))
    assert write_report([run]) == run / "report.html"


def test_the_data_equals_the_records_of_a_short_run(tmp_path: Path) -> None:
    rows = [r for r in records(40) if "event" not in r]
    data = run_data(write_run(tmp_path / "a", rows))
    loss = data["series"]["train/loss"]
    assert loss["s"] == [r["step"] for r in rows] and "lo" not in loss
    np.testing.assert_allclose(loss["y"], [r["train/loss"] for r in rows], rtol=1e-4)
    assert data["series"]["valid/loss"]["s"] == [10, 20, 30, 40]
    heat = data["heat"]["moe/load"]
    cube = np.frombuffer(base64.b64decode(heat["data"]), np.uint8).reshape(-1, heat["rows"], heat["columns"])
    wanted = np.clip(np.asarray(rows[-1]["moe/load"]) / 2.0, 0, 1)
    np.testing.assert_allclose(cube[-1] / 254, wanted, atol=0.5 / 254 + 1e-9)
    assert heat["steps"][0] == 1 and heat["steps"][-1] == 40
    depth = data["heat"]["depth/attention"]
    assert (depth["rows"], depth["columns"]) == (22, 6)


def test_tokens_flops_and_hours_are_offered_as_axes(tmp_path: Path) -> None:
    rows = [r for r in records(40) if "event" not in r]
    axes = run_data(write_run(tmp_path / "a", rows))["axes"]
    assert axes["tokens"][-1] == rows[-1]["train/consumed_tokens"]
    flops = sum(r["train/tflops"] * r["train/step_seconds"] for r in rows) * 1e12
    assert axes["flops"][-1] == pytest.approx(flops, rel=1e-4)
    assert axes["hours"][-1] == pytest.approx((rows[-1]["time"] - rows[0]["time"]) / 3600, rel=1e-4)


def test_logged_total_flops_go_before_the_estimate(tmp_path: Path) -> None:
    rows = [{"step": s, "time": float(s), "train/loss": 1.0, "train/flops_total": 5e15 * s} for s in (1, 2, 3)]
    assert run_data(write_run(tmp_path / "a", rows))["axes"]["flops"] == [5e15, 1e16, 1.5e16]


def test_buckets_lose_no_spike_and_no_step() -> None:
    values = np.ones(10_000)
    values[7_654], values[10] = 99.0, np.nan
    out = bucketed(np.arange(1, 10_001), values, 100)
    assert len(out["y"]) == 100 and max(out["hi"]) == 99.0 and out["s"][-1] == 10_000
    assert out["y"][0] == 1.0, "a nan takes no part in the mean"


def test_the_frame_keeper_keeps_first_and_last_of_any_length() -> None:
    for length in (1, 5, 64, 1001):
        keeper = FrameKeeper(16)
        for step in range(1, length + 1):
            keeper.add(step, [[float(step)]])
        chosen = [step for step, _ in keeper.chosen(16)]
        assert chosen[0] == 1 and chosen[-1] == length and len(chosen) <= 16
        assert chosen == sorted(set(chosen))


def test_a_name_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    rows = [{"step": 1, "train/loss": 1.0}, {"step": 1, "event": "x", "message": "</script><script>alert(1)</script>"}]
    page = render_report([write_run(tmp_path / "a", rows)], title="<b>& co")
    assert page.count("</script>") == 2 and "<title>&lt;b&gt;&amp; co</title>" in page
    assert page_data(page)["runs"][0]["events"][0]["message"].startswith("</script>")


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", records(5)) for parent in ("x", "y")]
    assert [r["name"] for r in page_data(render_report(runs))["runs"]] == ["run", "run (2)"]


@pytest.mark.parametrize("kind", ["no folder at all", "a folder without metrics", "a run without a step"])
def test_nothing_to_show_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "a run without a step":
        write_run(tmp_path, [{"step": 0, "event": "start", "message": ""}])
    with pytest.raises(DataError, match="needs at least one|holds no metrics"):
        render_report([] if kind == "no folder at all" else [tmp_path])


def test_a_large_model_fits_the_page_by_showing_fewer_frames(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    load = rng.random((60, 896)).round(3).tolist()
    rows = [{"step": s, "time": float(s), "train/loss": 3.0, "moe/load": load} for s in range(1, 16)]
    run = write_run(tmp_path / "r", rows)
    page = render_report([run, run, run])
    assert len(page) < PAGE_LIMIT
    assert len(page_data(page)["runs"][0]["heat"]["moe/load"]["steps"]) >= 2


@pytest.mark.ops
def test_a_hundred_thousand_steps_fit_in_five_megabytes(tmp_path: Path) -> None:
    base = [r for r in records(100, matrix_every=10) if "event" not in r]
    lines = [re.sub(rb'^\{"step": \d+', b"", encode_line(row)) for row in base]
    run = write_run(tmp_path / "long", [])
    with open(run / "metrics.jsonl", "wb") as file:
        for step in range(100_000):
            file.write(b'{"step": %d' % (step + 1) + lines[step % 100])
    path = write_report([run])
    assert path.stat().st_size < PAGE_LIMIT
    assert page_data(path.read_text())["runs"][0]["series"]["train/loss"]["s"][-1] == 100_000


PROBE = """
<script>
(async () => {
  const log = {};
  const wait = () => new Promise(done => setTimeout(done, 50));
  const paint = () => { const c = document.querySelector("#experts canvas"); return Array.from(c.getContext("2d").getImageData(0, 0, c.width, c.height).data).reduce((a, v, i) => (a * 31 + v) >>> 0, 7); };
  try {
    log.ready = document.documentElement.dataset.ready;
    log.title = document.getElementById("title").textContent;
    log.sections = [...document.querySelectorAll("section")].filter(s => s.childElementCount).map(s => s.id);
    log.charts = document.querySelectorAll("svg").length;
    log.curve = document.querySelector("#loss-chart path").getAttribute("d").length;
    log.axis = document.querySelector("#loss-chart svg").textContent;
    const slider = document.querySelector("#experts input.step");
    log.late = paint();
    slider.value = 0; slider.dispatchEvent(new Event("input")); await wait();
    log.early = paint(); log.step = document.querySelector("#experts output").textContent;
    document.querySelector('[data-axis="tokens"]').click(); await wait();
    log.tokens = document.querySelector("#loss-chart svg").textContent;
    document.getElementById("log").click(); await wait();
    log.logCurve = document.querySelector("#loss-chart path").getAttribute("d").length;
    const svg = document.querySelector("#loss-chart svg"), box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true }));
    log.tip = document.getElementById("tip").textContent;
    const legend = document.querySelector("#legend button"); legend.click(); await wait();
    log.hidden = legend.getAttribute("aria-pressed");
    log.wide = document.documentElement.scrollWidth <= innerWidth;
  } catch (error) { log.error = String(error) + error.stack; }
  document.body.insertAdjacentHTML("beforeend", "<pre id=probe></pre>");
  document.getElementById("probe").textContent = JSON.stringify(log);
})();
</script>
"""  # noqa: E501


def chromium(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--window-size=1280,3300", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


@pytest.mark.ops
@pytest.mark.skipif(BROWSER is None, reason="no Chromium; apt-get install chromium")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, records(200, seed=i)) for i, name in enumerate(("k3_tiny", "ablation"))]
    page = render_report(runs)
    (tmp_path / "probe.html").write_text(page.replace("</body>", PROBE + "</body>"))
    done = chromium(tmp_path, "--dump-dom", (tmp_path / "probe.html").as_uri())
    assert "CONSOLE" not in done.stderr or "Uncaught" not in done.stderr, done.stderr
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stdout[-2000:]
    log = json.loads(match.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert "error" not in log, log
    assert log["ready"] == "true" and log["title"] == "2 runs" and log["wide"]
    assert log["sections"] == ["summary", "loss", "experts", "depth", "decay", "speed", "events"]
    assert log["charts"] >= 12 and log["curve"] > 500 and log["logCurve"] > 500
    assert log["axis"].endswith("unigram 6.31") or "step" in log["axis"]
    assert "tokens" in log["tokens"] and "800k" in log["tokens"]
    assert log["step"] == "step 1" and log["early"] != log["late"]
    assert "k3_tiny" in log["tip"] and log["hidden"] == "false"


@pytest.mark.ops
@pytest.mark.skipif(BROWSER is None, reason="no Chromium; apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_the_page_has_its_curves_and_its_heatmap(tmp_path: Path, scheme: str) -> None:
    run = write_run(tmp_path / "k3_tiny", records(200))
    page = write_report([run])
    shot = tmp_path / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    chromium(tmp_path, *dark, f"--screenshot={shot}", page.as_uri())
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (3300, 1280, 3)
    background = pixels[5, 5]
    assert (background.mean() > 200) == (scheme == "light")

    def share(colour: tuple[int, int, int], rows: slice) -> float:
        return float((np.abs(pixels[rows] - colour).max(axis=-1) < 14).mean())

    assert share((0x1F, 0x6F, 0xB2), slice(300, 800)) > 5e-4, "the training curve"
    assert share((0xD9, 0x62, 0x2B), slice(300, 800)) > 5e-5, "the validation points"
    assert share((9, 46, 97), slice(1500, 2700)) > 2e-4, "the darkest cells of the depth heatmap"
