# SPDX-License-Identifier: Apache-2.0
"""Name what runs: a hash of each of Weft's own sources, and the versions beneath them."""

import hashlib
import platform
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("mpu", "model", "training", "csrc")
KINDS = (".py", ".cpp", ".cc", ".c", ".h", ".cu")


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return {"the file mpu/grid.py": hash, ..., "the version of torch": "2.13.0"}.

    Ranks that differ in one of them may compute different numbers, or wait for each other in
    different places. It takes some 10 ms.
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
