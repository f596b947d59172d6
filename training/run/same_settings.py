# SPDX-License-Identifier: Apache-2.0
"""Find how the flags, the data, the sources and the versions of two ranks differ.

The ranks compare them where they meet (training/run/rendezvous.py), before they connect.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpu.launch import Launch
from training.flags.flag_table import live_flags
from training.settings.config import Config
from training.settings.setting import flag_of

# the code that runs: the sources in these folders
ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("mpu", "model", "training", "csrc")
KINDS = (".py", ".cpp", ".cc", ".c", ".h", ".cu")


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return {"the file mpu/grid.py": hash, ..., "the version of torch": "2.13.0"}.

    Ranks that differ in one of them may compute different numbers, or wait for each other in
    different places. This takes about 10 ms.
    """
    files = [root / "pretrain_llama.py"]
    for room in ROOMS:
        files += [path for path in sorted((root / room).rglob("*")) if path.suffix in KINDS]
    found = {}
    for path in files:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        found[f"the file {path.relative_to(root).as_posix()}"] = digest
    versions = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
    }
    return found | {f"the version of {name}": text for name, text in versions.items()}


def settings_of(config: Config, digests: dict[str, str], launch: Launch) -> str:
    """Return, as JSON, what every rank of a run must have in common.

    digests: {name in messages: hash} of whatever else must be the same.
    """
    settings = json.loads(config.canonical_json()) | digests | sources()
    settings["whether WEFT_SECRET is set"] = bool(launch.point.secret)
    return json.dumps(settings, sort_keys=True)


def difference(mine: str, theirs: str, other: int) -> str:
    """Return how rank `other` differs from rank 0, in one sentence, or "" if it does not.

    mine, theirs: what settings_of returns on rank 0 and there.
    """
    different = differing(json.loads(mine), json.loads(theirs))
    if not different:
        return ""
    key = min(different, key=lambda key: (not key.startswith("the "), key))  # code first
    here, there = different[key]
    flag = flag_of(key)
    name = flag if flag in live_flags() else key
    if key.startswith("the file "):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        return f"{key} differs on rank 0 and rank {other}{more}: all must run the same code"
    return (
        f"{name} is {here!r} on rank 0 and {there!r} on rank {other}: all ranks need the same value"
    )


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two ranks differ: {name: (in a, in b)}."""
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}
