"""Means and their intervals."""

from __future__ import annotations

import math

import pytest
import torch

from k3data.batch import Batch
from k3train.config.compose import compose
from k3train.errors import ConfigError
from k3train.evaluate.commands import evaluate
from k3train.evaluate.heldout import estimate, proportion, recall, sequence_losses
from tests.model.golden_model import build, load_golden


def batch_of(tokens: torch.Tensor, length: int) -> Batch:
    mask = torch.ones(tokens.numel())
    mask[length - 1 :: length] = 0
    cu = torch.arange(0, tokens.numel() + 1, length, dtype=torch.int32)
    return Batch(tokens, tokens.roll(-1), mask, cu, length)


def test_the_interval_covers_the_truth_about_95_percent_of_the_time() -> None:
    torch.manual_seed(0)
    hits = 0
    for _ in range(400):
        weights = torch.randint(1, 20, (60,)).double()
        sums = weights * 2.0 + torch.randn(60).double() * weights.sqrt()
        e = estimate(sums.tolist(), weights.tolist())
        hits += e.low <= 2.0 <= e.high
    assert 0.91 < hits / 400 < 0.98


def test_one_sequence_has_no_interval_and_no_token_is_an_error() -> None:
    assert estimate([3.0], [1.0]).high == math.inf
    with pytest.raises(ValueError, match="no token"):
        estimate([0.0], [0.0])


@pytest.fixture(scope="module")
def model(one_rank, golden):  # type: ignore[no-untyped-def]
    return load_golden(build(one_rank, torch.float32), golden)


def test_sequence_losses_add_up_to_the_mean_loss(model) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1))
    sums, counts = sequence_losses(model, [batch_of(tokens, 20)], 20)
    assert counts == [19.0, 19.0, 19.0]
    alone, _ = sequence_losses(model, [batch_of(tokens[20:40], 20)], 20)
    assert alone[0] == pytest.approx(sums[1], rel=1e-5)


def test_the_interval_of_a_share_stays_inside_and_covers_the_truth() -> None:
    torch.manual_seed(0)
    hits = 0
    for _ in range(400):
        chance = (0.9 + 0.2 * (torch.rand(40) - 0.5)).double()  # sequences differ: the answers of one are alike
        right = torch.binomial(torch.full((40,), 12.0).double(), chance)
        e = proportion(right.tolist(), [12.0] * 40)
        assert 0 <= e.low <= e.mean <= e.high <= 1
        hits += e.low <= 0.9 <= e.high
    assert 0.91 < hits / 400 < 0.99


@pytest.mark.parametrize(("right", "low", "high"), [(8.0, 0.7, 1.0), (0.0, 0.0, 0.3)], ids=["all right", "none right"])
def test_ten_sequences_without_a_miss_do_not_prove_perfection(right: float, low: float, high: float) -> None:
    e = proportion([right] * 10, [8.0] * 10)
    assert e.mean == right / 8 and low < e.low + 0.03 and e.high < high + 0.03 and e.high - e.low > 0.2


class Oracle(torch.nn.Module):
    """Answers a recall episode by the last value written for the key, or wrongly every `lapse`-th question."""

    def __init__(self, vocabulary: int, lapse: int = 0) -> None:
        super().__init__()
        self.vocabulary, self.lapse, self.asked = vocabulary, lapse, 0

    def forward(self, tokens: torch.Tensor, labels: None, stream: object) -> torch.Tensor:
        logits = torch.zeros(len(tokens), self.vocabulary)
        last: dict[int, int] = {}
        asking = False
        for i, token in enumerate(tokens.tolist()):
            if asking and token in last and token < 67 + (self.vocabulary - 67) // 2:  # a key, not a value
                self.asked += 1
                wrong = self.lapse and self.asked % self.lapse == 0
                logits[i, 1 if wrong else last[token]] = 1
            elif i + 1 < len(tokens):
                last[token] = int(tokens[i + 1])
            asking = token == 1 or (asking and token != 0)
            last = {} if token == 0 else last
        return logits


@pytest.mark.parametrize(("lapse", "accuracy"), [(0, 1.0), (4, 0.75)])
def test_the_recall_suite_counts_answers(lapse: int, accuracy: float) -> None:
    from k3data.loader import evaluation_batches
    from k3data.recall import HELD_OUT, RecallDataset, parse_task

    task = parse_task("recall:overwrite,pairs=4,rewrites=3")
    dataset = RecallDataset(task, 128, vocab_size=320, seed=3, stream=HELD_OUT)
    batches = evaluation_batches(dataset, 12, micro_batch_size=1, device=torch.device("cpu"))
    e = recall(Oracle(320, lapse), batches, 128)  # type: ignore[arg-type]
    assert e.mean == pytest.approx(accuracy, abs=0.01) and e.units == 12 and e.low < e.mean <= e.high


def test_an_unknown_suite_is_refused_before_any_other_is_run() -> None:
    with pytest.raises(ConfigError, match="'held' is unknown; use heldout"):
        evaluate(compose(["evaluate.suites=[heldout,held]", "evaluate.source=/nowhere"]))
