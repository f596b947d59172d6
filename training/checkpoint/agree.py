# SPDX-License-Identifier: Apache-2.0
"""Do something on every rank and know on every rank how it went everywhere.

A disk fills on one rank; the others must not go on to a collective that it will never reach. So
each phase ends with an exchange of what happened, and what is decided from it is the same
everywhere.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpu.comm.collectives import gather_bytes
from mpu.comm.transport import Axis
from training.checkpoint.errors import MismatchError


@dataclass(frozen=True)
class Outcome:
    """What one rank answered: a value, or why it has none."""

    rank: int
    value: Any = None
    error: str = ""
    mismatch: bool = False


def together(
    work: Callable[[], Any], world: Axis, device: torch.device | None = None
) -> list[Outcome]:
    """Run work() here and return every rank's outcome, in rank order. Values travel as JSON.

    world: the axis of all ranks. device: where its collectives need their tensors (nccl: the rank's
    GPU). An Exception becomes an outcome; anything harsher (KeyboardInterrupt) goes on its way.
    """
    try:
        mine = {"value": work()}
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        mine = {"error": f"{error.strerror or error}{where}"}
    except MismatchError as error:
        mine = {"error": str(error), "mismatch": True}
    except Exception as error:
        mine = {"error": str(error) or type(error).__name__}
    texts = gather_bytes(json.dumps(mine).encode(), world, device)
    return [Outcome(rank, **json.loads(text)) for rank, text in enumerate(texts)]


def first_error(outcomes: list[Outcome]) -> Outcome | None:
    """Return the first failure, those of another model before those of a bad file."""
    failed = [o for o in outcomes if o.error]
    return min(failed, key=lambda o: (not o.mismatch, o.rank), default=None)
