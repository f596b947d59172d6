# SPDX-License-Identifier: Apache-2.0
"""Hold a collective or a message that is on its way: issued, recorded, waited for once."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from mpu.grid import Axis


class CommunicationError(RuntimeError):
    """A collective failed; the cause is usually a peer (mpu/comm/watch.py finds the first one)."""


class Label(NamedTuple):
    """Who starts a collective, and for which part of the step: what a trace is told.

    who: the layer, the bucket, the pipeline message or the name that it belongs to.
    phase: "forward", "backward", "wgrad", "grad sum", "gather", "norm", "update", ...
    """

    who: object
    phase: str


class Handle:
    """A collective in flight, with its tensors. `wait()` orders the current stream after it."""

    def __init__(
        self,
        work: Any = None,
        keep: tuple[Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
        what: str = "",
        event: Any = None,
    ) -> None:
        self._work, self._keep, self._finish = work, keep, finish
        self._what, self._event = what, event

    def wait(self) -> None:
        """Wait once; a second call does nothing."""
        work, finish, event = self._work, self._finish, self._event
        self._work = self._finish = self._event = None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise CommunicationError(f"{self._what}: {error}") from error
        if finish is not None:
            finish()
        if event is not None:
            event.waited()
        self._keep = ()

    def is_completed(self) -> bool:
        """True when the transfer is over, as far as the backend tells without waiting."""
        return self._work is None or bool(self._work.is_completed())


DONE = Handle()


def _wire_bytes(verb: str, tensor: Tensor, size: int) -> int:
    """Count the bytes one rank sends for a verb on its input `tensor`, by the ideal algorithm."""
    n = tensor.numel() * tensor.element_size()
    if verb == "receive":
        return 0
    if verb == "all_gather":
        return n * (size - 1)
    if verb == "all_reduce":
        return 2 * n * (size - 1) // size
    return n * (size - 1) // size if verb == "reduce_scatter" else n


def start(
    verb: str,
    axis: Axis,
    tensor: Tensor,
    call: Callable[[], Any],
    keep: tuple[Tensor, ...],
    finish: Callable[[], None] | None = None,
    async_op: bool = False,
    label: Label | None = None,
) -> Handle:
    """Issue one collective or message, record it, and wait for it unless `async_op`.

    label: who asks for it, for the axis' trace. A meta tensor has no bytes: the trace hears of it,
    and nothing is sent.
    """
    event = None
    if axis.trace is not None:
        event = axis.trace.issued(
            verb, axis, tensor, _wire_bytes(verb, tensor, axis.size), async_op, label
        )
    if tensor.is_meta:
        return DONE
    what = f"{verb} over {axis.name} (ranks {list(axis.ranks)})"
    try:
        work = call()
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {error}") from error
    handle = Handle(work, keep, finish, what, event)
    if not async_op:
        handle.wait()
    return handle
