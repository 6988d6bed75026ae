"""The associative-memory toy: its known numbers, what forgetting buys, and that its rules are those of the kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from k3kernels.kda.naive import naive_recurrence
from k3train.demo import memory as toy
from k3train.errors import ConfigError


@pytest.fixture(scope="module")
def rows() -> dict[str, toy.Row]:
    return {row.memory: row for row in toy.measure(30)}


def test_the_four_known_numbers_come_out(rows: dict[str, toy.Row]) -> None:
    assert toy.pair(rows["linear"].seed_0) == "1.20 / 0.31"
    assert toy.pair(rows["delta"].seed_0) == "0.00 / 0.36"


def test_only_the_linear_memory_keeps_the_old_value(rows: dict[str, toy.Row]) -> None:
    assert rows["linear"].average[0] > 1
    assert all(row.average[0] < 1e-12 for name, row in rows.items() if name != "linear")


def test_forgetting_helps_after_stale_pairs_and_costs_without_them(rows: dict[str, toy.Row]) -> None:
    kda, gated, delta, linear = (rows[n].after_stale[1] for n in ("KDA", "gated delta", "delta", "linear"))
    assert kda < gated < delta < linear
    assert rows["delta"].average[1] < min(rows["gated delta"].average[1], rows["KDA"].average[1])


@pytest.mark.parametrize("name", ["delta", "gated delta", "KDA"])
def test_the_rule_is_that_of_the_kernels(name: str) -> None:
    rule = next(m for m in toy.memories() if m.name == name)
    stream = toy.draw(range(2))
    state = rule.write(np.zeros((2, toy.DIM, toy.DIM)), stream.keys, stream.values)
    k, v = torch.tensor(stream.keys)[:, :, None], torch.tensor(stream.values)[:, :, None]
    decay = torch.tensor(rule.decay).log().expand_as(k)
    _, expected = naive_recurrence(k, k, v, decay, torch.ones(2, toy.PAIRS, 1), scale=1.0)
    np.testing.assert_allclose(state.swapaxes(1, 2), expected[:, 0].numpy(), atol=1e-12)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "memory.png"
    assert toy.main(["--seeds", "2", "--output", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "1.20 / 0.31" in out and "0.00 / 0.36" in out and "0.99" in out


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--sedes", "3"]], ids=" ".join)
def test_a_wrong_word_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        toy.main(words)
