# SPDX-License-Identifier: Apache-2.0
"""Record a rank that runs for real on gloo, in the language of a rehearsal, to compare the two.

What the record leaves out or does otherwise than a plain run, and why:

    the outbox's thread   a message is waited for at once (host.py): the thread frees it when its
                          peer has it, at a moment that differs from run to run
    gloo                  gets copies of the tensors, and its results are copied back: its own
                          thread holds what it got a little longer than the wait
    GradientCheck         compares values, which a rehearsal does not have
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forecast.rehearsal import main
from forecast.rehearsal.group import Distributed, Group, P2POp, Work
from forecast.rehearsal.host import Host
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.run import Rehearsed, heard_in, rehearse
from mpu.comm import collectives
from mpu.launch import Launch

COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "isend",
    "irecv",
)  # fmt: skip


class Listening(Distributed):
    """Record each call of torch.distributed, and make it."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        super().__init__(recorder, rank)
        self.call: dict[str, Any] = {name: getattr(dist, name) for name in COLLECTIVES}
        self.known: dict[Any, Group] = {}
        self.call |= {name: getattr(dist, name) for name in ("batch_isend_irecv", "P2POp")}

    def install(self, patches: Patches) -> None:
        """Replace the functions that mpu calls."""
        made = {name: self._both(name) for name in COLLECTIVES}
        for name, function in made.items():
            patches.replace(dist, name, function)
        patches.replace(dist, "batch_isend_irecv", self.batch_isend_irecv)
        patches.replace(dist, "P2POp", P2POp)
        patches.replace(dist, "init_process_group", lambda *args, **kwargs: None)
        patches.replace(collectives, "_all_gather", made["all_gather_into_tensor"])
        patches.replace(collectives, "_reduce_scatter", made["reduce_scatter_tensor"])

    def _both(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted = getattr(Distributed, name)(self, *args, **kwargs)
            with _disable_current_modes():
                aside = {id(x): copy(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
                real = self.call[name](*(aside.get(id(x), x) for x in args), **kwargs)
            back = (args[0], aside[id(args[0])]) if name != "isend" else None
            started = Started(noted, real, back)
            return started if noted is not None else started.over()

        call.__name__ = name
        return call

    def batch_isend_irecv(self, ops: Any) -> Any:
        """Note messages that start together, and start them."""
        works, real = [], []
        with self._batched(), _disable_current_modes():
            for op in ops:
                name = op.op.__name__
                noted = getattr(Distributed, name)(self, op.tensor, op.peer, op.group)
                aside = copy(op.tensor)
                back = (op.tensor, aside) if name == "irecv" else None
                works.append(Started(noted, None, back))
                real.append(self.call["P2POp"](self.call[name], aside, op.peer, op.group))
            for work, started in zip(works, self.call["batch_isend_irecv"](real), strict=True):
                work.real = started
        return works

    def _of(self, group: Any) -> Any:
        group = super()._of(group)
        if group not in self.known:
            self.known[group] = self._group(tuple(dist.get_process_group_ranks(group)))
        return self.known[group]


class Started:
    """A collective or message that is noted and under way. back: a tensor, and its copy."""

    def __init__(self, noted: Work | None, real: Any, back: tuple[Tensor, Tensor] | None) -> None:
        self.noted, self.real, self.back = noted, real, back

    def wait(self) -> bool:
        """Note the wait, and wait."""
        assert self.noted is not None
        self.noted.wait()
        self.over()
        return True

    def over(self) -> None:
        """Wait, and copy the result back."""
        if self.real is not None:
            self.real.wait()
        if self.back is not None:
            with _disable_current_modes():
                self.back[0].copy_(self.back[1])
        self.real = self.back = None

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self.real is None or bool(self.real.is_completed())


def copy(x: Tensor) -> Tensor:
    """Return a copy that is not in torch's own memory."""
    memory = torch.frombuffer(bytearray(max(1, x.nbytes)), dtype=torch.uint8)
    return memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def record(script: ModuleType, argv: list[str], launch: Launch, real: bool) -> Rehearsed:
    """Run a rank's steps on the CPU and record them; afterwards torch and mpu are as before.

    real: for real, beside the other ranks of a world that has met over gloo.
    """
    config = main.read(script, argv, launch.world)
    recorder = Recorder("cpu")
    network = (Listening if real else Distributed)(recorder, launch.rank)
    network.answers = heard_in(config, script, launch.rank)
    with Patches() as patches:
        Host(recorder, real).install(patches, network)
        network.install(patches)
        steps = config.rehearse.rehearse_steps
        return rehearse(
            script, config, launch, recorder, network, steps, patches=patches, real=real
        )
