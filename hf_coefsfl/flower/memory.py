"""Memory of a process that handles large tensors one after the other."""

from __future__ import annotations

import contextlib
import ctypes

_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_freed_memory(from_size: int = 1 << 20) -> None:
    """Have the allocator give large blocks back to the system as soon as they are freed, if it has that setting.

    Otherwise glibc keeps them for reuse, and small tensors that outlive them make the pieces too small for that.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, from_size)
