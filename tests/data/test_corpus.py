from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from k3data.corpus import Report, default_corpus, find_sources, fraction_of, read_documents, split_source
from k3train.errors import DataError
from tests.data.texts import write_jsonl


def documents(inputs: list[str], field: str = "text") -> tuple[dict[str, str], Report]:
    report = Report()
    sources = find_sources(inputs, report)
    return {d.name: d.text for source in sources for d in read_documents(source, field, report)}, report


def test_a_folder_gives_one_document_a_file_and_counts_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "a.py").write_text("hidden")
    (folder / "a.py").write_text("x = 1\n")
    (folder / "inner" / "b.md").write_text("# title\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "zeros.txt").write_bytes(b"a\0b")
    found, report = documents([str(folder)])
    assert found == {"code/a.py": "x = 1\n", "code/inner/b.md": "# title\n"}
    assert report.troubles() == {"other_files": 1, "binary": 1}
    assert "other_files: code/picture.png" in report.examples


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "**", "sub*"])
def test_globs_find_files_once(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub" / "b.txt").write_text("two")
    found, report = documents([f"{tmp_path}/{pattern}"])
    expected = {"*.txt": {"one"}, "**/*.txt": {"one", "two"}, "**": {"one", "two"}, "sub*": {"two"}}[pattern]
    assert sorted(found.values()) == sorted(expected)
    assert report.duplicates == 0


def test_a_file_named_twice_is_read_once_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    found, report = documents([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"])
    assert len(found) == 1 and report.duplicates == 1


def test_equal_names_in_two_folders_stay_apart(tmp_path: Path) -> None:
    for side in ("left", "right"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.txt").write_text(side)
    found, _ = documents([f"{tmp_path}/left/a.txt", f"{tmp_path}/right/a.txt"])
    assert sorted(found.values()) == ["left", "right"]


@pytest.mark.parametrize("bytes_each", [50, 333, 10_000, 10**9])
def test_ranges_of_json_lines_give_the_documents_of_the_whole(tmp_path: Path, bytes_each: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 100)
    whole, _ = documents([str(path)])
    report = Report()
    source = find_sources([str(path)], report)[0]
    pieces = [
        (d.name, d.text) for part in split_source(source, bytes_each) for d in read_documents(part, "text", report)
    ]
    assert pieces == list(whole.items())


def test_gzip_gives_the_documents_of_the_plain_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 50)
    (tmp_path / "z").mkdir()
    packed = tmp_path / "z" / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, _ = documents([str(path)])
    unpacked, report = documents([str(packed)])
    assert list(unpacked.values()) == list(plain.values()) and not report.troubles()


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("damage", ["cut short", "bytes flipped"])
def test_a_damaged_archive_is_kept_up_to_there_and_counted(tmp_path: Path, suffix: str, damage: str) -> None:
    text = write_jsonl(tmp_path / "source.jsonl", 2000).read_bytes()
    data = bytearray(gzip.compress(text))
    if damage == "cut short":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(data)
    found, report = documents([str(path)])
    assert report.truncated == 1
    assert any(example.startswith(f"truncated: a.{suffix}.gz") for example in report.examples)
    assert 0 < sum(map(len, found.values())) < len(text)


def test_invalid_utf8_is_kept_with_replacements_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    found, report = documents([f"{tmp_path}/a.txt"])
    assert found == {"a.txt": "caf\ufffd au lait"}
    assert report.troubles() == {"invalid_utf8": 1}


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufefftext".encode())
    assert documents([f"{tmp_path}/a.txt"])[0] == {"a.txt": "text"}


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    good = json.dumps({"text": "good"})
    lines = [good, "{broken", json.dumps({"body": "x"}), json.dumps({"text": "  "}), json.dumps({"text": 3}), "", "[1]"]
    lines += [json.dumps({"text": "half \ud800 pair"}), good]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # no newline at the end
    found, report = documents([f"{tmp_path}/a.jsonl"])
    assert list(found.values()) == ["good", "half ? pair", "good"]
    assert report.troubles() == {"invalid_json": 1, "missing_field": 3, "empty": 1, "invalid_utf8": 1}
    assert any("(has: body)" in example for example in report.examples)


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "here"}))
    assert list(documents([f"{tmp_path}/a.jsonl"], "body")[0].values()) == ["here"]


def test_the_default_corpus_is_the_standard_library_without_tests() -> None:
    sources = default_corpus()
    names = [source.name for source in sources]
    assert "stdlib/json/decoder.py" in names and "pydoc/lambda" in names
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert 8e6 < sum(source.size for source in sources) < 2e7


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match="did you mean '.*corpus.txt'"):
        documents([f"{tmp_path}/corpsu.txt"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["/no/such/folder/a.txt"], "the folder '/no/such/folder' does not exist"),
        (["/no/such/*.txt"], "matches no file or folder; the folder '/no/such' does not exist"),
        ([], "no input was given"),
    ],
    ids=["missing-folder", "glob-in-a-missing-folder", "nothing"],
)
def test_inputs_that_name_nothing_are_refused(inputs: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("*", r"\*")):
        documents(inputs)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text file"):
        documents([str(tmp_path)])


def test_the_split_follows_the_name_alone_and_is_even() -> None:
    assert fraction_of("stdlib/json/decoder.py") == fraction_of("stdlib/json/decoder.py")
    values = [fraction_of(f"file-{i}") for i in range(4000)]
    assert min(values) >= 0 and max(values) < 1
    assert abs(sum(v < 0.1 for v in values) / 4000 - 0.1) < 0.02
