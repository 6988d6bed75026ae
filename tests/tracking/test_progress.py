from __future__ import annotations

import io
import re

import pytest

from k3train.tracking.progress import Progress, clock, count, final_table

METRICS = {"train/loss": 4.1234, "train/lr": 1e-3, "train/tokens_per_second": 5123.4}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00"), (42.4, "00:42"), (3661, "1:01:01"), (2 * 86400 + 3 * 3600 + 600, "2d 03:10")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(873, "873"), (5123, "5,123"), (48_100, "48.1k"), (1.24e6, "1.24M")])
def test_count(value: float, text: str) -> None:
    assert count(value) == text


def test_a_log_gets_plain_lines_that_grep_understands() -> None:
    out = io.StringIO()
    with Progress(200, 0, every_seconds=1e9, every_steps=50, stream=out) as progress:
        for step in range(1, 201):
            progress.update(step, METRICS)
    lines = out.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 51, 101, 151, 200]
    pattern = r"step \d+/200 loss 4\.123 lr 1\.0e-03 tok/s 5123 eta (\d\d:\d\d|--:--)"
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert "\x1b" not in out.getvalue()


def test_a_resumed_run_shows_its_first_step_at_once() -> None:
    out = io.StringIO()
    progress = Progress(200, 120, every_seconds=1e9, every_steps=50, stream=out)
    progress.update(121, METRICS)
    assert out.getvalue().startswith("step 121/200 ")


def test_a_terminal_gets_a_bar_and_sentences_above_it() -> None:
    out = io.StringIO()
    progress = Progress(10, 0, terminal=True, stream=out)
    progress.update(5, METRICS)
    progress.say("saved [step 5]")
    progress.final_table([("loss", "8.31 to 4.12")], "next: k3train generate")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "saved [step 5]" in text and "4.123" in text and "8.31 to 4.12" in text
    assert text.rstrip().endswith("next: k3train generate")


def test_the_final_table_is_aligned_text_in_a_log() -> None:
    out = io.StringIO()
    final_table({"loss": "4.12", "validation loss": "4.20"}, "next: do this", stream=out)
    assert out.getvalue() == "  loss             4.12\n  validation loss  4.20\nnext: do this\n"
