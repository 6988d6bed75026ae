"""Error feedback: the gain on a matrix, few tokens, and a whole model shared by several processes."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import weakref
from pathlib import Path

import pytest
import torch

from k3train.weights import gptq, mxfp4
from k3train.weights.compare import compare
from k3train.weights.mxfp4 import Packed
from k3train.weights.quantize import REPORT
from k3train.weights.quantizing import table
from k3train.weights.reader import HFFolder
from k3train.weights.streaming import LayerStream
from tests.parallel.pool import pool
from tests.weights import gptq_cases
from tests.weights.helpers import change_tensors, golden_folder, same_bytes, stored
from tests.weights.test_quantize import off_the_grid, quantise

WIDTH = 128


class Inputs:
    """Correlated inputs with outlier channels; an expert sees a part of its own on top of what all share."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        basis, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g))
        self.shared = basis * torch.arange(1, WIDTH + 1).pow(-0.5)
        self.shared[:4] *= 4
        self.own, _ = torch.linalg.qr(torch.randn(WIDTH, 8, generator=g))
        self.weight = 0.02 * torch.randn(96, WIDTH, generator=g)
        self.g = g

    def of_all(self, n: int) -> torch.Tensor:
        return torch.randn(n, WIDTH, generator=self.g) @ self.shared.T

    def of_expert(self, n: int) -> torch.Tensor:
        return 0.8 * self.of_all(n) + 0.3 * torch.randn(n, 8, generator=self.g) @ self.own.T

    def gain_db(self, hessian: torch.Tensor) -> float:
        """Output SQNR above round-to-nearest on fresh tokens."""
        rounded = mxfp4.quantise(self.weight)
        codes = gptq.feedback_codes(self.weight, rounded.scale, hessian)
        fed = Packed(mxfp4.pack(codes), rounded.scale)
        test = self.of_expert(4000)
        noise = [gptq.output_error(self.weight, q.dequantise(torch.float32), test)[1] for q in (rounded, fed)]
        return 10 * math.log10(noise[0] / noise[1])


@pytest.fixture
def inputs():
    return Inputs()


def test_feedback_with_many_tokens_gains_more_than_two_decibels(inputs):
    assert inputs.gain_db(gptq.second_moment(inputs.of_expert(4096))) > 2


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_an_expert_of_few_tokens_gains_through_the_pooled_statistics(inputs, tokens):
    own = gptq.second_moment(inputs.of_expert(tokens))
    pool_ = gptq.second_moment(inputs.of_all(4096))
    assert inputs.gain_db(gptq.shrunk_hessian(own, tokens, pool_)) > 1.5
    assert inputs.gain_db(gptq.shrunk_hessian(own, tokens, pool_)) > inputs.gain_db(own) + 0.5


def test_without_a_common_input_space_shrinkage_goes_to_the_own_diagonal(inputs):
    own = gptq.second_moment(inputs.of_expert(32))
    shrunk = gptq.shrunk_hessian(own, 32, None)
    share = 32 / (32 + WIDTH)
    off = ~torch.eye(WIDTH, dtype=torch.bool)
    assert torch.allclose(shrunk[off], share * own[off])
    assert torch.allclose(shrunk.diagonal(), own.diagonal())
    assert gptq.shrunk_hessian(own, 4 * WIDTH, None) is own


def test_uncorrelated_inputs_leave_round_to_nearest_unchanged(inputs):
    rounded = mxfp4.quantise(inputs.weight)
    codes = gptq.feedback_codes(inputs.weight, rounded.scale, torch.eye(WIDTH))
    assert torch.equal(mxfp4.pack(codes), rounded.packed)


def test_weights_already_on_the_grid_stay_as_they_are(inputs):
    rounded = mxfp4.quantise(inputs.weight)
    values = rounded.dequantise(torch.float32)
    codes = gptq.feedback_codes(values, rounded.scale, gptq.second_moment(inputs.of_expert(64)))
    assert torch.equal(Packed(mxfp4.pack(codes), rounded.scale).dequantise(torch.float32), values)


def test_channels_that_no_token_excited_are_simply_rounded(inputs):
    x = inputs.of_expert(512)
    x[:, 32:64] = 0
    rounded = mxfp4.quantise(inputs.weight)
    codes = gptq.feedback_codes(inputs.weight, rounded.scale, gptq.second_moment(x))
    assert torch.equal(codes[:, 32:64], mxfp4.unpack(rounded.packed)[:, 32:64])


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return change_tensors(golden_folder(tmp_path_factory.mktemp("trained")), off_the_grid)


@pytest.fixture(scope="module")
def fed(one_rank, trained, tmp_path_factory):
    """The tiny model quantised by one process."""
    output = tmp_path_factory.mktemp("fed") / "out"
    gptq_cases.quantise(str(trained), str(output))
    return output


def test_no_matrix_that_takes_feedback_was_worse_where_it_was_decided_and_the_gain_is_real(trained, fed):
    report = json.loads((fed / REPORT).read_text())
    notes = report["matrices"]
    assert report["matrices_by_method"]["gptq"] > 0.5 * len(notes)
    assert all("kept_rounding" in note for note in notes.values() if note["method"] == "rtn")
    gains = [n["output_sqnr_db"] - n["output_sqnr_rtn_db"] for n in notes.values() if n.get("output_sqnr_db")]
    assert len(gains) > 100 and sum(gains) / len(gains) > 0.2
    assert "on tokens that decided nothing" in table(report)


def test_everything_but_the_routed_experts_keeps_its_bytes(trained, fed):
    before, after = stored(trained), stored(fed)
    kept = [name for name in before if name in after]
    assert len(kept) == len(before) - 8 * 8 * 3
    assert all(same_bytes(before[name], after[name]) for name in kept)


def test_feedback_holds_one_layer_of_the_model_and_the_one_before_it(one_rank, trained, tmp_path, monkeypatch):
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    made, most, real = 0, 0, LayerStream.layer

    def layer(self, index, source, *, experts=True):
        nonlocal made, most
        built = real(self, index, source, experts=experts)
        gc.collect()
        alive.add(built)
        made, most = made + 1, max(most, len(alive))
        return built

    monkeypatch.setattr(LayerStream, "layer", layer)
    gptq_cases.quantise(str(trained), str(tmp_path / "out"))
    assert made == 9 and most <= 2


def test_two_processes_write_the_bytes_of_one(trained, fed, tmp_path):
    output = tmp_path / "out"
    pool(2).run("tests.weights.gptq_cases:quantise", source=str(trained), output=str(output), timeout=240)
    assert hashes(output) == hashes(fed)


def test_an_interrupted_quantisation_resumes_to_the_same_bytes(one_rank, trained, fed, tmp_path):
    output = tmp_path / "out"
    gptq_cases.quantise(str(trained), str(output), stop_after=9)
    assert not (output / "model.safetensors.index.json").exists()
    first = {p: p.stat().st_mtime_ns for p in output.glob("*.safetensors")}
    assert len(first) >= 9
    gptq_cases.quantise(str(trained), str(output))
    assert {p: p.stat().st_mtime_ns for p in first} == first
    assert hashes(output) == hashes(fed)


def test_the_comparison_of_a_model_with_itself_reads_zero_and_with_its_quantised_form_does_not(
    one_rank, trained, fed, tmp_path
):
    reference = HFFolder(trained)
    batches = gptq_cases.sequences(2, 9)
    options = {"batches": batches, "device": torch.device("cpu"), "dtype": torch.float32}
    same = compare(reference.model, reference, reference, **options)
    assert same.model is not None and same.model.kl_mean == pytest.approx(0, abs=1e-6)
    assert same.model.top1_agreement == 1 and same.model.loss_quantised == same.model.loss_reference
    assert [line.relative for line in same.layers] == [0.0] * 8
    other = compare(reference.model, reference, HFFolder(fed), **options)
    assert other.model is not None and other.model.kl_mean > 1e-6
    assert all(0.005 < line.relative < 0.3 and line.cosine > 0.95 for line in other.layers)
    quantise(trained, tmp_path / "rtn")
    rounded = compare(reference.model, reference, HFFolder(tmp_path / "rtn"), **options)
    assert sum(line.relative for line in other.layers) < sum(line.relative for line in rounded.layers)
