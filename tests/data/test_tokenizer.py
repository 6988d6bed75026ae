from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from k3data.tokenizer import END_OF_DOCUMENT, Tokenizer, tokenizer_file
from k3train.errors import DataError
from tests.data.texts import sentence


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train((sentence(i) for i in range(200)), 500)


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "  indented\n\tby a tab\r\n",
        "naïve café 数据 🦊",
        "\x00\x01 control",
        "",
        " ",
        f"a {END_OF_DOCUMENT} b",
    ],
    ids=["words", "white-space", "other-scripts", "control-bytes", "nothing", "a-space", "the-end-token-as-text"],
)
def test_text_comes_back_unchanged(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_the_end_token_written_in_a_text_is_not_the_end_token(trained: Tokenizer) -> None:
    assert trained.eod == trained.inner.token_to_id(END_OF_DOCUMENT)
    assert trained.eod not in trained.encode(f"before {END_OF_DOCUMENT} after")


def test_a_saved_tokenizer_loads_and_encodes_alike(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    for path in (tmp_path / "tokenizer.json", tmp_path):
        loaded = Tokenizer.load(path)
        assert (loaded.eod, loaded.vocab_size) == (trained.eod, trained.vocab_size)
        assert loaded.encode(f"seven wizards {END_OF_DOCUMENT}") == trained.encode(f"seven wizards {END_OF_DOCUMENT}")


def test_training_twice_gives_the_same_vocabulary() -> None:
    first, second = (Tokenizer.train((sentence(i) for i in range(100)), 400) for _ in range(2))
    assert first.inner.to_str() == second.inner.to_str()


def test_batches_encode_like_single_texts(trained: Tokenizer) -> None:
    texts = [sentence(i) for i in range(5)]
    assert trained.encode_batch(texts) == [trained.encode(text) for text in texts]


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    assert 257 <= Tokenizer.train(["ab ab"], 4096).vocab_size < 300


def test_no_template_tokens_are_added(trained: Tokenizer, tmp_path: Path) -> None:
    record = json.loads(trained.inner.to_str())
    record["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END_OF_DOCUMENT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_DOCUMENT: {"id": END_OF_DOCUMENT, "ids": [trained.eod], "tokens": [END_OF_DOCUMENT]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    assert Tokenizer.load(tmp_path).encode("tea") == trained.encode("tea")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(DataError, match="does not exist; give a Hugging Face tokenizer.json"):
        tokenizer_file("/nowhere/tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a Hugging Face tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_an_end_token_is_refused(tmp_path: Path) -> None:
    Inner(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no end-of-document token"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="none of <stop> is in its vocabulary"):
        Tokenizer.load(tmp_path, eod_token="<stop>")


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size=100"):
        Tokenizer.train(["x"], 100)
