# SPDX-License-Identifier: Apache-2.0
"""The state of one rank while it trains."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mpu.grid import Grid
from mpu.optim.optimizer import Optimizer
from mpu.pipeline.engine import Engine
from mpu.pipeline.schedules import Schedule
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.run.model_profile import StagedModel
from training.settings.config import Config
from training.settings.pipeline_schedule import schedule_of


@dataclass
class Run:
    """The state of one rank while it trains. build() of pretrain_llama.py makes it."""

    config: Config
    grid: Grid
    device: torch.device
    model: StagedModel
    engine: Engine
    sink: ParamAndGradBuffer
    optimizer: Optimizer
    monitor: FailureMonitor
    iteration: int = 0
    consumed: int = 0  # samples

    def __post_init__(self) -> None:
        self.schedule = cache(partial(schedule_of, self.config))  # by number of micro-batches

    @property
    def module(self) -> nn.Module:
        """Return the model as a torch module."""
        assert isinstance(self.model, nn.Module)
        return self.model


class RunSchedule(Protocol):
    """Execute a schedule on micro-batches; return fp64 [3]: losses, tokens, auxiliary.

    run_schedule() of pretrain_llama.py is one.
    """

    def __call__(
        self, run: Run, schedule: Schedule, batches: list[Batch], tokens: int, during: str
    ) -> Tensor: ...
