# SPDX-License-Identifier: Apache-2.0
"""Define the settings of logs and profiles."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    log_interval: int = 10  # steps
    log_json: str | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    log_params_norm: bool = False
    sample_interval: int | None = None  # steps; None: never
    sample_prompt: str | None = None  # None: the start of a held-out sample
    profile: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: tuple[int, ...] = (0,)
    record_memory_history: bool = False
    memory_snapshot_path: str | None = None  # None: beside the profile
