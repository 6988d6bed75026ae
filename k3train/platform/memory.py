"""Keep memory that was freed: activations of the next step want the same pages again."""

from __future__ import annotations

import ctypes

# malloc.h of glibc
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1
_MMAP_MOST = 1 << 25  # glibc takes no more


def keep_freed_memory() -> bool:
    """Tell glibc neither to map large blocks apart nor to give the heap's end back, which costs page faults every step.

    Returns False where the C library has no mallopt; nothing is lost then but some time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    taken = [
        mallopt(*setting)
        for setting in ((_MMAP_THRESHOLD, _MMAP_MOST), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, 1 << 26))
    ]
    return all(taken)
