# SPDX-License-Identifier: Apache-2.0
"""Write files so that they survive a crash, and compute their checksums.

Files are made with mode 0600 and never through a link or over an existing file. A safetensors file
is 8 bytes of header length, a JSON header, then the tensors one after another. It is written and
checksummed here piece by piece, so that a save holds one tensor in host memory at a time. Reading
uses the safetensors library.

There are two checksums. XXH3-128 (https://xxhash.com) runs at the speed of memory: a load compares
it, and it misses a random error with probability 2^-128. SHA-256 is several times slower but hard
to forge: `tools/checkpoint.py verify` and sha256sum compare it.
"""

import errno
import hashlib
import json
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from training.checkpoint.errors import CheckpointError
from training.checkpoint.pieces import NamedPiece, dtype_name
from training.files.untrusted import trusted

Hook = Callable[[str], None]
SUMS: dict[str, tuple[Any, str]] = {  # by their keys in a manifest
    "sha256": (hashlib.sha256, "SHA-256"),
    "xxh3_128": (xxhash.xxh3_128, "XXH3-128"),
}


class _Hashed:
    """A new file whose writes are checksummed; leaving the block without error fsyncs it.

    One thread computes the SHA-256 of large data while it is written. Another calls fsync from
    time to time, so that the disk starts to write early.
    """

    CHUNK, AHEAD = 16 << 20, 64 << 20  # bytes in one write; bytes between two fsyncs

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        self._sha, self._xxh3 = hashlib.sha256(), xxhash.xxh3_128()
        self._hashing, self._syncing = (ThreadPoolExecutor(1, name) for name in ("hash", "sync"))
        self._synced, self._sync = 0, Future[None]()
        self._sync.set_result(None)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        hashed = None
        if len(data) < self.CHUNK:
            self._sha.update(data)
        else:
            hashed = self._hashing.submit(self._sha.update, data)
        view = memoryview(data)
        try:
            while view:
                done = self._file.write(view[: self.CHUNK])
                self._xxh3.update(view[:done])
                self.size += done
                view = view[done:]
                if self.size - self._synced >= self.AHEAD and self._sync.done():
                    self._synced, before = self.size, self._sync
                    self._sync = self._syncing.submit(os.fsync, self._file.fileno())
                    before.result()
        finally:
            if hashed is not None:
                hashed.result()

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._hashing.shutdown()
            self._syncing.shutdown()  # before the file is closed under it
            if error is None:
                self._sync.result()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def info(self) -> dict[str, Any]:
        sums = {"sha256": self._sha.hexdigest(), "xxh3_128": self._xxh3.hexdigest()}
        return {"size": self.size, **sums}


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file; return its size and checksums."""
    with _Hashed(path) as out:
        out.write(data)
    return out.info()


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write a new JSON file; return its size and checksums."""
    return write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return the bytes of a value in a JSON file. Raises TypeError and ValueError."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_safetensors(
    path: Path,
    pieces: Sequence[NamedPiece],
    hook: Hook = lambda phase: None,
    metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write pieces under their keys, hook("piece") before each; return size and checksums."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for piece in pieces:
        header[piece.key] = {
            "dtype": dtype_name(piece.tensor.dtype),
            "shape": list(piece.sizes),
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _Hashed(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            hook("piece")
            data = piece.data().detach().cpu().contiguous()
            assert data.dtype == piece.tensor.dtype and tuple(data.shape) == piece.sizes
            out.write(data.reshape(-1).view(torch.uint8).numpy().data)
    return out.info()


def open_directory(path: Path, holder: object) -> Path:
    """Open a directory that is no link and has a trusted owner; return a path to read by.

    Raises CheckpointError. On Linux, while `holder` exists, the path refers to this very directory,
    even if another one takes its name. The mode is not checked: some file systems show everything
    as writable by everybody.
    """
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        linked = error.errno in (errno.ELOOP, errno.ENOTDIR)
        why = " is a link or not a directory" if linked else f": {error.strerror}"
        raise CheckpointError(f"{path.name}{why}") from None
    weakref.finalize(holder, os.close, fd)
    _check_owner(path, os.fstat(fd))
    by_descriptor = Path(f"/proc/self/fd/{fd}")
    return by_descriptor if by_descriptor.exists() else path


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not trusted(found.st_uid):
        raise CheckpointError(
            f"{path.name} belongs to the user with number {found.st_uid}, neither to this one nor "
            f"to root: if you trust that user, --trust-owner {found.st_uid} reads it where it is"
        )


def open_plain(path: Path, links: bool = False) -> BufferedReader:
    """Open a plain file to read, which must be no link and have a trusted owner.

    links: follow a link of a trusted owner, as those of Hugging Face's cache are. Raises
    CheckpointError naming the file. It never blocks, as opening a pipe would.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    try:
        if links and stat.S_ISLNK((found := path.lstat()).st_mode):
            _check_owner(path, found)
            flags &= ~getattr(os, "O_NOFOLLOW", 0)
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        why = " is a link" if error.errno == errno.ELOOP else f": {error.strerror}"
        raise CheckpointError(f"{path.name}{why}") from None
    found = os.fstat(file.fileno())
    try:
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path.name} is not a plain file")
        _check_owner(path, found)
    except CheckpointError:
        file.close()
        raise
    return file


def check_size(path: Path, size: int, links: bool = False) -> None:
    """Raise CheckpointError unless `path` is a plain file of `size` bytes.

    links: see open_plain().
    """
    open_sized(path, size, links).close()


def open_sized(path: Path, size: int, links: bool = False) -> BufferedReader:
    """Open a plain file of `size` bytes to read. Raises CheckpointError."""
    file = open_plain(path, links)
    found = os.fstat(file.fileno()).st_size
    if found != size:
        file.close()
        raise CheckpointError(f"{path.name} has {found} bytes where {size} were written")
    return file


def check_file(path: Path, info: dict[str, Any], sha256: bool = False) -> None:
    """Raise CheckpointError unless `path` has the size and the checksum of `info`.

    The checksum is SHA-256 where `sha256` is set or `info` has no other, else XXH3-128.
    """
    kind = "sha256" if sha256 or "xxh3_128" not in info else "xxh3_128"
    with open_sized(path, info["size"]) as file:
        _check_sum(path, hashlib.file_digest(file, SUMS[kind][0]), kind, info)


def read_checked(path: Path, info: dict[str, Any]) -> bytes:
    """Return the bytes of a small file after checking size and SHA-256. Raises CheckpointError."""
    with open_sized(path, info["size"]) as file:
        data = file.read(info["size"] + 1)
    _check_sum(path, hashlib.sha256(data), "sha256", info)
    return data


def _check_sum(path: Path, found: Any, kind: str, info: dict[str, Any]) -> None:
    if found.hexdigest() != info[kind]:
        raise CheckpointError(f"{path.name} has another {SUMS[kind][1]} than when it was written")
