# SPDX-License-Identifier: Apache-2.0
"""Draw the memory of a rank over a step, for `--dry-run --memory-picture FILE`.

The numbers come from dry_run.step_memory; the report prints the largest of them.
tools/draw_memory.py draws them in a process of its own, as this room may not import tools.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast.dry_run import fullest, step_memory, with_vocabulary
from forecast.moments import Moment
from forecast.recording import recordings_of
from mpu.pipeline.schedules import Action
from training.run.text import in_units
from training.settings.config import Config
from training.settings.pipeline_schedule import micro_batch_counts

TOOL = Path(__file__).resolve().parent.parent / "tools" / "draw_memory.py"


def drawn_of(config: Config, script: ModuleType) -> dict[str, Any]:
    """Return the contents of the picture: bytes of each kind in each action of a step, and titles.

    It shows the pipeline rank that needs the most memory. Raises ValueError if the vocabulary's
    size is not known.
    """
    config = with_vocabulary(config)
    if config.model.vocab_size is None:
        raise ValueError(
            f"--memory-picture {config.run.memory_picture}: memory depends on the vocabulary size, "
            "and there is no tokenizer file; give --vocab-size"
        )
    size = config.parallel.pipeline_model_parallel_size
    found, p = recordings_of(config, script), config.parallel
    peaks = [fullest(config, each) for each in found]
    rank = max(range(size), key=lambda r: peaks[r].total)
    peak, step = peaks[rank], step_memory(config, found[rank])
    drawn = [each.action for each in step if isinstance(each.action, Action)]
    count = 1 + max(each.micro_batch for each in drawn)
    every = max(micro_batch_counts(config))
    chunks = 1 + max(each.chunk for each in drawn)
    which = f"Pipeline rank {rank} of {size} ({p.schedule})" if size > 1 else "One rank"
    about = "the fullest moment of each action"
    if count < every:
        about += f"; drawn with {count} micro-batches for {every:,}: "
        about += "more repeat those in the middle"
    return {
        "title": f"{which}: memory over a step",
        "subtitle": about,
        "peak": f"peak {in_units(peak.total)}, {said(peak, chunks)}",
        "steps": [[short(each, chunks), each.kinds] for each in step],
    }


def said(moment: Moment, chunks: int) -> str:
    """Return a moment's action as text."""
    if not isinstance(action := moment.action, Action):
        return action
    of_chunk = f" of chunk {action.chunk}" * (chunks > 1)
    return f"{action.kind}{of_chunk}, micro-batch {action.micro_batch}"


def short(moment: Moment, chunks: int) -> str:
    """Return an action's short name: F0, with several chunks F0.1; else "sums" or "update"."""
    if not isinstance(action := moment.action, Action):
        return action.partition(" ")[0]
    return f"{action.kind}{action.micro_batch}" + f".{action.chunk}" * (chunks > 1)


def draw(config: Config, script: ModuleType) -> str:
    """Write the file of --memory-picture and return a line for the report.

    Raises ValueError with the tool's message if the tool fails.
    """
    file = str(config.run.memory_picture)
    words = json.dumps(drawn_of(config, script))
    done = subprocess.run(
        [sys.executable, str(TOOL), file], input=words, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{TOOL.name} ended with {done.returncode}"]
        raise ValueError(f"--memory-picture {lines[-1]}")
    return f"\ndrawn: {file}"
