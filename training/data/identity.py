# SPDX-License-Identifier: Apache-2.0
"""Identify a corpus by a digest of every token, computed at the speed of the disk.

The digest is the XXH3-128 of token type, counts, all lengths, and the XXH3-128 of each 64 MiB of
the .bin. XXH3 does not protect against two files made to have the same digest.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from mpu.launch import cores
from training.data.cache import IndexCache
from training.data.watched import WatchedFile

PART, READ = 64 << 20, 4 << 20  # bytes of one digest, and of one read
CACHE_FROM = 256 << 20  # bytes; a smaller file is hashed in a moment
THREADS = 8  # at most
QUIET = 5.0  # seconds before progress is reported, and between two lines of it
SLOW = 50e6  # bytes per second, the least that is assumed of another process


def full_digest(
    data: WatchedFile,
    lengths: np.ndarray,
    dtype: str,
    stamps: Mapping[str, object],
    cache: IndexCache | None,
) -> str:
    """Return the digest of a corpus file, 32 hex digits, from the cache if it is there.

    stamps: the names, sizes and times that are its key in the cache. One of the processes that
    share a cache computes it, and the others wait. Raises DataError if the file was truncated.
    """
    if cache is None:
        cache = IndexCache("", print)
    report = cache.report

    def compute() -> np.ndarray:
        facts = xxhash.xxh3_128(f"{dtype} {len(lengths)} {data.size}".encode())
        facts.update(np.ascontiguousarray(lengths).data)
        for part in _parts(data, report):
            facts.update(part)
        return np.frombuffer(facts.digest(), np.int32)

    if data.size < CACHE_FROM or not cache.directory:
        return compute().tobytes().hex()
    patience = 600 + data.size / SLOW
    return cache.get(stamps, 4, compute, f"the digest of {data.path}", patience).tobytes().hex()


def _parts(data: WatchedFile, report: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the XXH3-128 of each part, in order."""
    own = threading.local()

    def digest(first: int) -> bytes:
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(READ, np.uint8)
        found, end = xxhash.xxh3_128(), min(first + PART, data.size)
        for at in range(first, end, READ):
            part = own.buffer[: min(READ, end - at)]
            data.fill(part, at)
            found.update(part.data)
        return found.digest()

    began = reported = time.monotonic()
    threads = min(THREADS, cores())
    with ThreadPoolExecutor(threads, "weft-digest") as pool:
        for i, part in enumerate(pool.map(digest, range(0, data.size, PART))):
            now = time.monotonic()
            if now - reported >= QUIET:
                reported, done = now, min((i + 1) * PART, data.size)
                report(
                    f"{data.path}: {done / data.size:.0%} of {data.size:,} bytes hashed, once for "
                    f"all runs, at {done / (now - began) / 1e9:.2f} GB/s"
                )
            yield part
