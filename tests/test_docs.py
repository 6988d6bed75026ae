"""The documents speak of what is there: verbs, test files, pictures, and one table in two places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CARD = yaml.safe_load((ROOT / "verification.yaml").read_text())
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("kind", ["verified", "unverified"])
def test_every_entry_names_what_when_and_how(kind: str) -> None:
    wanted = {"claim", "command", "machine", "date"} if kind == "verified" else {"claim", "why"}
    for entry in CARD[kind]:
        assert wanted <= set(entry), entry


def test_commands_of_the_card_point_at_files_that_exist() -> None:
    for entry in CARD["verified"]:
        for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+", entry["command"]):
            assert (ROOT / path).exists(), entry


def test_the_readme_shows_the_claims_of_the_card() -> None:
    shown = re.findall(r"^\| (.+?) \| `(.+?)` \| (\w+) \|$", README, flags=re.M)
    assert [s[0] for s in shown] == [e["claim"] for e in CARD["verified"]]
    assert [s[1] for s in shown] == [e["command"] for e in CARD["verified"]]
    assert [s[2] for s in shown] == [e["machine"] for e in CARD["verified"]]


def test_verbs_and_pictures_of_the_readme_exist() -> None:
    from k3train.verbs import VERBS

    words = {name.split()[0] for name in VERBS}
    for verb in re.findall(r"\./run k3train (\w+)", README):
        assert verb in words, verb
    for picture in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (ROOT / picture).is_file(), picture


def test_golden_data_are_unedited() -> None:
    import hashlib

    folder = ROOT / "tests" / "golden"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split(maxsplit=1)
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
