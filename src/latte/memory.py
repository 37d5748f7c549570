"""Memory of the host."""

import ctypes
import os

from latte.ops.dispatch import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""
_MOST = 2**31 - 1


def keep_freed_pages() -> None:
    """Lets a process that computes on the CPU keep the memory that it frees.

    glibc gives large blocks back to the kernel at once, and every step of a program then faults the
    same pages in again: a third of a small model's step. Elsewhere than on glibc nothing happens.
    """
    if platform() != "cpu" or os.name != "posix":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, 2**30)
    mallopt(_TRIM_THRESHOLD, _MOST)
    mallopt(_TOP_PAD, 2**26)
