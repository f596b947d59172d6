# SPDX-License-Identifier: Apache-2.0
"""Put bytes on disk so that they are there after a crash, and know their SHA-256.

Files are made with mode 0600 and never through a link or over an existing file. A safetensors file
is 8 bytes of header length, a JSON header, then the tensors one after another; it is written here
piece by piece, hashed on the way, so that a save holds one tensor in host memory at a time. Reading
uses the safetensors library.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from training.checkpoint.errors import CheckpointError
from training.checkpoint.pieces import NamedPiece, dtype_name

Hook = Callable[[str], None]


class _Hashed:
    """A new file that hashes what goes through it; leaving the block without error fsyncs it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._sha = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._sha.update(data)
        self.size += len(data)

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def info(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self._sha.hexdigest()}


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file. Returns {"size", "sha256"}."""
    with _Hashed(path) as out:
        out.write(data)
    return out.info()


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write a new JSON file. Returns {"size", "sha256"}."""
    return write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_safetensors(
    path: Path,
    pieces: Sequence[NamedPiece],
    hook: Hook = lambda phase: None,
    metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write pieces under their keys. Returns {"size", "sha256"}; calls hook("piece") before
    each."""
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
            out.write(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return out.info()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_size(path: Path, size: int) -> None:
    """Raise CheckpointError unless `path` is a plain file (no link) of that many bytes."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path.name} is not a plain file")
    if found.st_size != size:
        raise CheckpointError(f"{path.name} has {found.st_size} bytes where {size} were written")


def check_file(path: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError unless `path` has the size and the SHA-256 of `info`."""
    check_size(path, info["size"])
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != info["sha256"]:
            raise CheckpointError(f"{path.name} does not have the SHA-256 it was written with")


def read_checked(path: Path, info: dict[str, Any]) -> bytes:
    """Return the bytes of a small file after checking size and SHA-256."""
    check_size(path, info["size"])
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != info["sha256"]:
        raise CheckpointError(f"{path.name} does not have the SHA-256 it was written with")
    return data
