"""Small corpora on disk, and one dataset prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3data.manifest import Manifest
from k3data.prepare import prepare
from tests.data.texts import write_jsonl


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """600 documents of 10 to 70 words, 10 % held out."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "text.jsonl", 600)
    return prepare([str(folder / "text.jsonl")], vocab_size=400, workers=1, validation_fraction=0.1,
                   output=folder / "prepared")  # fmt: skip
