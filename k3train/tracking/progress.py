"""What the terminal shows while a run works: a rich bar for people, plain greppable lines for logs."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

RATE_WINDOW = 20  # steps over which the time left is estimated


def clock(seconds: float) -> str:
    """`00:42`, `3:05:10`, `2d 03:10` from seconds."""
    total = max(int(round(seconds)), 0)
    days, rest = divmod(total, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


def count(value: float) -> str:
    """A rate in the fewest readable digits: `873`, `5,123`, `48.1k`, `1.24M`."""
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    return f"{value:,.0f}"


class Progress:
    """Progress of a run from `start_step` to `total_steps`.

    On a terminal a live bar with step, loss, tokens/s and the time left. Elsewhere a line every `every_seconds` or
    `every_steps`, whichever comes first, and always for the first and the last step:
    `step 12/200 loss 4.123 lr 1.0e-03 tok/s 5123 eta 00:42`.

    Args:
        total_steps: the last step of the run.
        start_step: the step the run resumes after (0 for a new one).
        terminal: force one form or the other; None asks the stream.
        stream: standard output by default.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        every_seconds: float = 10.0,
        every_steps: int = 20,
        terminal: bool | None = None,
        stream: IO[str] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.stream = sys.stdout if stream is None else stream
        self.terminal = self.stream.isatty() if terminal is None else terminal
        self.every_seconds = every_seconds
        self.every_steps = max(every_steps, 1)
        self._step = start_step
        self._first = True
        self._shown_step = start_step
        self._shown_time = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), start_step)], maxlen=RATE_WINDOW + 1)
        self._bar: Any = None
        self._console: Any = None
        if self.terminal:
            self._start_bar(start_step)

    def _start_bar(self, start_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=self.stream, force_terminal=True, highlight=False)
        self._bar = Progress(
            TextColumn("[bold]step {task.completed:,.0f}[/][dim]/{task.total:,.0f}[/]"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("[cyan]{task.percentage:>3.0f}%[/]"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]left[/] {task.fields[eta]}"),
            console=self._console,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=self.total_steps, completed=start_step, numbers="", eta="--:--")
        self._bar.start()

    def _eta(self) -> float | None:
        (then, first), (now, last) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        return (now - then) / (last - first) * (self.total_steps - last)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step; reads `train/loss`, `train/lr`, `train/tokens_per_second` where present."""
        now = time.monotonic()
        self._marks.append((now, step))
        self._step = step
        eta = self._eta()
        left = clock(eta) if eta is not None else "--:--"
        loss, lr, rate = (metrics.get(f"train/{key}") for key in ("loss", "lr", "tokens_per_second"))
        if self._bar is not None:
            parts = [f"[dim]loss[/] [bold]{loss:.3f}[/]" if loss is not None else ""]
            parts.append(f"[dim]tok/s[/] {count(rate)}" if rate is not None else "")
            self._bar.update(self._task, completed=step, numbers="  ".join(p for p in parts if p), eta=left)
            return
        due = now - self._shown_time >= self.every_seconds or step - self._shown_step >= self.every_steps
        if not (due or self._first or step >= self.total_steps):
            return
        self._first, self._shown_step, self._shown_time = False, step, now
        words = [f"step {step}/{self.total_steps}"]
        words += [f"loss {loss:.3f}"] if loss is not None else []
        words += [f"lr {lr:.1e}"] if lr is not None else []
        words += [f"tok/s {rate:.0f}"] if rate is not None else []
        self._line(" ".join([*words, f"eta {left}"]))

    def _line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def say(self, message: str) -> None:
        """Print a sentence above the bar, or as a line of its own."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            self._line(message)

    def final_table(self, rows: Mapping[str, str] | Sequence[tuple[str, str]], sentence: str = "") -> None:
        """End the bar and print the closing table of (name, value), then a sentence (the next command to type)."""
        self.close()
        final_table(rows, sentence, terminal=self.terminal, stream=self.stream)

    def close(self) -> None:
        """Take the bar down; what was printed stays."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def final_table(
    rows: Mapping[str, str] | Sequence[tuple[str, str]],
    sentence: str = "",
    *,
    title: str = "",
    terminal: bool | None = None,
    stream: IO[str] | None = None,
) -> None:
    """A table of (name, value): drawn by rich on a terminal, aligned plain text elsewhere; then a sentence."""
    out = sys.stdout if stream is None else stream
    pairs = [(str(name), str(value)) for name, value in (rows.items() if isinstance(rows, Mapping) else rows)]
    if out.isatty() if terminal is None else terminal:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ROUNDED, show_header=False, title=title or None, border_style="dim", padding=(0, 1))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(Text(name), Text(value))
        console = Console(file=out, force_terminal=True, highlight=False)
        console.print(table)
        if sentence:
            console.print(sentence, markup=False)
        return
    if title:
        print(title, file=out)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"  {name:<{width}}  {value}", file=out)
    if sentence:
        print(sentence, file=out)
    out.flush()
