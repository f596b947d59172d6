# SPDX-License-Identifier: Apache-2.0
"""Keep the C library from returning memory to the system: a step frees what the next one takes."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # what mallopt accepts


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks; return False where the C library has no such switch.

    Otherwise every block of some megabytes is unmapped when freed, and its pages are faulted in
    again, zeroed, at the next use: thousands of page faults a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1)
    )
