"""Made-up text for the data tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "brew", "tea,",
    "naïve", "café", "数据", "and", "42", "more",
)  # fmt: skip


def sentence(seed: int, words: int = 40) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + ".\n"


def write_jsonl(path: Path, count: int, seed: int = 0) -> Path:
    lines = [json.dumps({"text": sentence(seed * 10_000 + i, 10 + i % 60), "id": i}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
