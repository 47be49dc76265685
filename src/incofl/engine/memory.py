"""Freed memory is kept for the next allocation of its size.

The C library returns large blocks to the system when they are freed. Every training step and every round allocates the
same blocks again, and the system must find and clear each of their pages anew: about a tenth of a training step.
"""

import ctypes
import os

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """For this process; does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, _MAX_INT)


def worker_environment() -> dict[str, str]:
    """The environment of a process that computes with one thread, in large pages where the system has them."""
    tunables = [os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"]
    return os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ":".join(filter(None, tunables))}
