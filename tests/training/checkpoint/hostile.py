# SPDX-License-Identifier: Apache-2.0
"""Change the JSON of a checkpoint or of a Hugging Face directory at random, with valid digests."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import xxhash

from training.checkpoint.manifest import self_digest

ODD: list[Any] = [None, True, False, 0, -1, 1, 2, 4.5, -0.0, 1e308, 5e-324, 10**9, 2**31, 2**63 - 1]
ODD += [
    -(2**63),
    "",
    "4",
    "x" * 300,
    "\x1b[2J",
    "\u202e",
    "../../etc/passwd",
    "llama",
    "nan",
    [],
    {},
]
ODD += [[[]], [0], [2**62] * 9, {"a": 1}, ["a"], [[[0], [2**62]]], "F32", "step", "\n"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the path of every value inside a value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def change(value: Any, rng: random.Random) -> Any:
    """Return a copy in which one to three values are odd, gone, doubled or swapped."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randrange(1, 4)):
        found = places(value)
        if not found:
            return rng.choice(ODD)
        *path, last = rng.choice(sorted(found, key=len)[: rng.choice([30, len(found)])])
        inside = value
        for key in path:
            inside = inside[key]
        how = rng.random()
        if how < 0.6:
            inside[last] = rng.choice(ODD)
        elif how < 0.8:
            del inside[last]
        elif how < 0.9:
            inside[last] = [inside[last]] * rng.randrange(3)
        elif isinstance(inside, dict):
            inside[rng.choice(["step", "files", "config", "extra", "__metadata__"])] = inside[last]
    return value


def torn(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with some changed, cut or added."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at, how = rng.randrange(len(out) + 1), rng.random()
        if how < 0.5 and at < len(out):
            out[at] = rng.choice([0, 0x22, 0x5B, 0x7B, 0x2D, 0x39, 0xFF, rng.randrange(256)])
        elif how < 0.7:
            out[at:] = b""
        else:
            out[at:at] = rng.choice(
                [b'"\\ud800"', b"[" * 5000, b"1e999", b"9" * 50, b"\xff", b"NaN"]
            )
    return bytes(out)


def spoil_step(source: Path, target: Path, rng: random.Random) -> None:
    """Copy a step's directory, one of its JSON files changed and all digests made to fit."""
    shutil.copytree(source, target)
    name = rng.choice(["index.json", "state.json", "manifest.json", "manifest.json"])
    manifest = json.loads((target / "manifest.json").read_text())
    if name != "manifest.json":
        data = (target / name).read_bytes()
        if rng.random() < 0.8:
            data = json.dumps(change(json.loads(data), rng)).encode()
        else:
            data = torn(data, rng)
        (target / name).write_bytes(data)
        sums = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        manifest["files"][name] |= {**sums, "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    else:
        manifest = change(manifest, rng)
    if isinstance(manifest, dict):
        manifest["digest"] = self_digest(manifest)
    text = json.dumps(manifest).encode()
    (target / "manifest.json").write_bytes(text if rng.random() < 0.9 else torn(text, rng))


def spoil_hf(source: Path, target: Path, rng: random.Random) -> None:
    """Copy a Hugging Face directory with its config or the header of its tensors changed."""
    shutil.copytree(source, target)
    if rng.random() < 0.6:
        config = json.loads((target / "config.json").read_text())
        text = json.dumps(change(config, rng)).encode()
        (target / "config.json").write_bytes(text if rng.random() < 0.8 else torn(text, rng))
        return
    data = (target / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + length], data[8 + length :]
    head = (
        torn(head, rng)
        if rng.random() < 0.3
        else json.dumps(change(json.loads(head), rng)).encode()
    )
    length = len(head) if rng.random() < 0.9 else rng.choice([0, 2**63, 2**64 - 1, len(head) + 1])
    (target / "model.safetensors").write_bytes(length.to_bytes(8, "little") + head + rest)
