# SPDX-License-Identifier: Apache-2.0
"""Agreeing on stopping and on skipped updates: one step late, without waiting for a step."""

import contextlib

import torch

from mpu.grid import Axis
from training import control
from training.control import Agreement, _Flags

STEPS = [
    (False, 0.0),
    (True, 0.0),
    (False, 1.0),
    (False, 0.0),
    (True, 1.0),
]  # of rank 1: told to stop, skipped


def answers(comm):
    agreement, found = Agreement(comm.grid().world), []
    for stop, found_inf in STEPS:
        mine = stop and comm.rank == 1
        found.append(agreement.ask(mine, torch.tensor(found_inf)))
    return [*found, agreement.close()]


def test_every_rank_hears_one_step_later_what_one_rank_said(world):
    heard = [(False, False), (False, False), (True, False), (False, True), (False, False)]
    heard.append((True, True))  # of the last step, at the end
    assert world(2).run(answers) == [heard, heard]
    assert Agreement(Axis("world")).ask(True, torch.tensor(0.0)) == (False, False)


def test_on_a_device_the_host_waits_for_a_copy_and_nothing_else(monkeypatch):
    """The order of calls, with stand-ins for the stream, its event and the collective."""
    told = []

    class Stream:
        def wait_stream(self, other):
            told.append(f"stream after {other}")

        def record_event(self):
            told.append("event")
            return self

        def synchronize(self):
            told.append("host waits for the event")

    class Reduced:
        def wait(self):
            told.append("stream after the sum")

    @contextlib.contextmanager
    def on(stream):
        told.append("on the stream")
        yield
        told.append("off it")

    empty = torch.empty
    monkeypatch.setattr(control, "all_reduce", lambda x, axis, async_op: (x, Reduced()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the step")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kw: empty(*args, **kw))
    flags = torch.tensor([0.0, 2.0])
    asked = _Flags(flags, Axis("world"), Stream())
    queued = ["stream after the step", "on the stream", "stream after the sum", "event", "off it"]
    assert told == queued
    flags.fill_(7.0)  # the device may go on with its memory
    assert asked.read() == (False, True)
    assert told[len(queued) :] == ["host waits for the event"]
