# SPDX-License-Identifier: Apache-2.0
"""The loss on held-out data that a checkpoint records, by which the best one is chosen.

With --keep-best, state.json of a step that was evaluated has

    "evaluation": {"set": "wiki", "digest": SHA-256 of its samples, "loss": 2.31, "only": true}

It is written with the checkpoint, so no kill separates the two. `only`: the step was saved for its
loss alone, so the checkpoint is removed once another one has a lower loss. Losses are compared if
set and digest are equal.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from training.checkpoint.errors import CheckpointError
from training.checkpoint.files import open_directory
from training.checkpoint.manifest import STATE, read_manifest, read_part

EVALUATION = "evaluation"  # of state.json


@dataclass(frozen=True)
class Evaluation:
    """A loss in nats per token, and its data. set: "" if there is a single held-out set."""

    set: str
    digest: str
    loss: float
    only: bool = False

    @property
    def comparable(self) -> tuple[str, str]:
        """Return the key that must be equal for two losses to be compared."""
        return self.set, self.digest


def evaluation_in(state: Mapping[str, Any]) -> Evaluation | None:
    """Return the evaluation in a state.json, None if it has none. Raises CheckpointError."""
    entry = state.get(EVALUATION)
    if entry is None:
        return None
    kinds = {"set": str, "digest": str, "loss": float, "only": bool}
    assert kinds.keys() == {field.name for field in fields(Evaluation)}
    sound = type(entry) is dict and entry.keys() == kinds.keys()
    if not sound or any(type(entry[name]) is not kind for name, kind in kinds.items()):
        raise CheckpointError(f"{STATE}: {EVALUATION} must hold {', '.join(kinds)}")
    if not math.isfinite(entry["loss"]):
        raise CheckpointError(f"{STATE}: the loss of {EVALUATION} is not finite")
    return Evaluation(**entry)


def evaluation_of(directory: Path) -> Evaluation | None:
    """Return the evaluation of a checkpoint, None if it has none or cannot be read."""
    holder = Directory()
    with suppress(CheckpointError, OSError):
        at = open_directory(directory, holder)
        return evaluation_in(read_part(at, read_manifest(directory, at), STATE))
    return None


class Directory:
    """Keeps a directory open while it is read."""
