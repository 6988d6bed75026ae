"""The golden checkpoint through the importer into the model that trains: its stored logits come out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from k3train.weights.load import load_weights
from k3train.weights.reader import HFFolder
from tests.model.golden_model import build, stream_of
from tests.weights.helpers import TINY, golden_folder


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16 experts", "MXFP4 experts"])
def test_an_imported_golden_model_computes_its_stored_logits(one_rank, tmp_path, packed):
    model = build(one_rank, torch.float32)
    load_weights([model], HFFolder(golden_folder(tmp_path, packed=packed)), one_rank)
    io = load_file(TINY / "io.safetensors")
    tokens, stream = stream_of(io, "seq")
    with torch.no_grad():
        got = model(tokens, None, stream)
    want = io["fp32.seq.logits"].flatten(0, 1)
    assert (got - want).abs().max() < 2e-5 * want.abs().max()
