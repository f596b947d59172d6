# SPDX-License-Identifier: Apache-2.0
"""What a recording says of a rank of a running world, for tests that hold a run against it."""

import pretrain_llama
from forecast.recording import GATHERED, STATE, UNSHARDED, Recording, record
from mpu.grid import Grid
from training.settings.config import Config


def recorded(config: Config, grid: Grid, few: int = 0) -> Recording:
    """Return the recording of a rank of a grid."""
    return record(config, pretrain_llama, [grid.pp.rank], few, grid.rank)[grid.pp.rank]


def state(recording: Recording) -> dict[str, int]:
    """Return the bytes that are kept from step to step, as an Optimizer's memory() names them."""
    return {kind: recording.start[kind] for kind in STATE}


def memory(recording: Recording) -> dict[str, int]:
    """Return these bytes, and what a memory report adds to them (memory_report.transient)."""
    return state(recording) | {kind: recording.most(kind) for kind in (UNSHARDED, GATHERED)}
