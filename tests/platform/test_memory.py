"""Freed memory is kept: a step's blocks come back without page faults."""

from __future__ import annotations

import subprocess
import sys

# Left alone, glibc sometimes keeps blocks by itself: what lies at the heap's end decides, which differs from run to run.
# So both programs start where large blocks are always mapped apart.
PROGRAM = """
import ctypes, resource, sys
import torch
from k3train.platform import keep_freed_memory
MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 17)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def churn():
    for _ in range(20):
        blocks = [torch.ones(1 << 20) for _ in range(8)]
        del blocks
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


def test_blocks_are_reused_without_page_faults() -> None:
    assert faults("keep") * 10 < faults("leave")
