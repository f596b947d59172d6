# SPDX-License-Identifier: Apache-2.0
"""Open what a log is written to: a file of JSON lines, TensorBoard's events, Weights & Biases."""

import os
from pathlib import Path
from typing import Any

from training.run.output import hushed
from training.untrusted import owner_only, private


def open_json(path: Path) -> Any:
    """Open the JSON log to append, dropping a last line that a killed run left torn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            content = path.read_bytes()
            last = content.rfind(b"\n") + 1
            if last < len(content):
                os.truncate(path, last)
        return open(path, "a", encoding="utf-8", opener=private)
    except OSError as error:
        raise ValueError(f"--log-json {path}: cannot be written ({error.strerror})") from None


def open_tensorboard(directory: str, start_iteration: int) -> Any:
    """Open TensorBoard's writer, hiding events after the iteration that the run resumes from."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {directory}: the package tensorboard is not installed;"
            " pip install tensorboard, or leave the flag out"
        ) from None
    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        purge = start_iteration + 1 if start_iteration else None
        with owner_only():
            return hushed(lambda: SummaryWriter(directory, purge_step=purge))
    except OSError as error:
        raise ValueError(f"--tensorboard-dir {directory}: {error.strerror}") from None


def open_wandb(project: str, name: str | None, run_config: dict[str, Any] | None) -> Any:
    """Start a Weights & Biases run."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"--wandb-project {project}: the package wandb is not installed; pip install wandb,"
            " or leave the flag out"
        ) from None
    with owner_only():
        return wandb.init(project=project, name=name, config=run_config)
