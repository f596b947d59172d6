# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages between stages: send, receive, and the queue of sends in flight.

Messages from one rank to another arrive in the order of the sends. Nothing here blocks: a receive
is posted early and waited for when its data is needed; a send stays in the SendQueue until it is
complete. Each direction has its own axis (`pp`, `pp_back`), so that on NCCL a receive that waits
for its peer never blocks a send in the other direction.
"""

from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from mpu.comm.transport import Axis, Handle, Label
from mpu.worker import Worker


def send(x: Tensor, axis: Axis, to: int, label: Label | None = None) -> Handle:
    """Start sending x to the axis' rank `to`; x must not change before the handle's `wait`."""
    return axis.required_transport.send(x, axis, to, label)


def receive(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    axis: Axis,
    source: int,
    label: Label | None = None,
) -> tuple[Tensor, Handle]:
    """Post a receive from the axis' rank `source`; the data is valid after the handle's wait."""
    out = torch.empty(shape, dtype=dtype, device=device)
    return out, axis.required_transport.receive(out, axis, source, label)


def exchange(
    x: Tensor, axis: Axis, to: int, source: int, into: Tensor, label: Label | None = None
) -> Handle:
    """Start sending x to the axis' rank `to` and receiving `into` (contiguous) from `source`.

    Every rank of the axis makes the same call. The handle waits for both messages.
    """
    return axis.required_transport.exchange(x, axis, to, source, into, label)


class SendQueue:
    """Keep each message until it is sent, then free its memory.

    gloo cannot report whether a send is complete, only wait for it: a thread does that, in the
    order of the sends. NCCL can report it (`polls`), and a wait would hold up the compute stream.
    As a context manager the queue waits at the end for all messages; on NCCL only the stream waits.
    Raises CommunicationError, at the next call, when a send fails. worker: owns the thread, which
    successive queues share.

    _flying: the messages in flight, each with the event that the thread sets once it is sent.
    """

    def __init__(self, polls: bool, worker: Worker) -> None:
        self._polls, self._worker = polls, worker
        self._flying: list[tuple[Handle, Event | None]] = []
        self._error: BaseException | None = None

    def put(self, handle: Handle) -> None:
        """Keep a message until it is sent."""
        self.check()
        left = None if self._polls else Event()
        if left is not None:
            self._worker.put(partial(self._wait, handle, left))
        self._flying.append((handle, left))

    def check(self) -> None:
        """Free the messages that are sent; raise the error of a send that failed."""
        self._flying = [
            (handle, left) for handle, left in self._flying
            if not (handle.is_completed() if left is None else left.is_set())
        ]  # fmt: skip
        if self._error is not None:
            raise self._error

    def _wait(self, handle: Handle, left: Event) -> None:
        if self._error is None:
            try:
                handle.wait()
            except RuntimeError as error:  # CommunicationError too
                self._error = error
        left.set()

    def __enter__(self) -> "SendQueue":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._worker.leave()  # its thread may wait for a rank that is gone
            return
        for handle, left in self._flying:
            if left is None:
                handle.wait()
            else:
                with handle.blocked():
                    left.wait()
        self.check()
