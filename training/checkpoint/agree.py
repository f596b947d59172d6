# SPDX-License-Identifier: Apache-2.0
"""Run something on every rank and let every rank know how it went on all of them.

When a disk fills on one rank, the others must not go on to a collective that it never reaches. So
each phase ends with an exchange of outcomes, from which every rank decides the same.
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
    GPU). An Exception becomes an outcome; any other BaseException (KeyboardInterrupt) is raised.
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
    """Return the failure of the lowest rank, mismatches before all others, or None."""
    failed = [o for o in outcomes if o.error]
    return min(failed, key=lambda o: (not o.mismatch, o.rank), default=None)
