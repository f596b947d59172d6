# SPDX-License-Identifier: Apache-2.0
"""Run a function on every rank and exchange the outcomes.

When a disk fills up on one rank, the others must not continue to a collective that it never
reaches. So each phase ends with an exchange of outcomes, by which all ranks decide the same.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mpu.comm.collectives import gather_bytes
from mpu.comm.transport import Axis
from training.checkpoint.errors import CheckpointError, MismatchError

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The outcome on one rank: a value, or an error."""

    rank: int
    value: Any = None
    error: str = ""
    mismatch: bool = False


def together(
    work: Callable[[], Any], world: Axis, device: torch.device | None = None
) -> list[Outcome]:
    """Run work() and return the outcomes of all ranks, in rank order. Values are sent as JSON.

    world: the axis of all ranks. device: that of the tensors of its collectives (nccl: the rank's
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
    """Return the failure of the lowest rank, mismatches before other failures, or None."""
    failed = [o for o in outcomes if o.error]
    return min(failed, key=lambda o: (not o.mismatch, o.rank), default=None)


def on_all(work: Callable[[], T], world: Axis, device: torch.device | None = None) -> T:
    """Return work() of this rank. If it fails on one, all raise: that one its own error, the others
    CheckpointError. work() must be no collective.
    """
    made, raised = list[T](), list[Exception]()

    def attempt() -> None:
        try:
            made.append(work())
        except Exception as error:
            raised.append(error)
            raise

    failed = first_error(together(attempt, world, device))
    if raised:
        raise raised[0]
    if failed is not None:
        raise CheckpointError(f"rank {failed.rank}: {failed.error}")
    return made[0]
