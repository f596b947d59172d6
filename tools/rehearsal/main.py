# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank and report: what `tools/rehearse.py` does once torch may be imported."""

import json
import sys
import warnings
from dataclasses import replace
from types import ModuleType
from typing import Any

from mpu.launch import Launch
from mpu.param import PlacementError
from tools.rehearsal import replay, report
from tools.rehearsal.device import install
from tools.rehearsal.findings import findings
from tools.rehearsal.group import Distributed
from tools.rehearsal.host import Host
from tools.rehearsal.memory import memory
from tools.rehearsal.patches import Patches
from tools.rehearsal.record import Recorder
from tools.rehearsal.run import Rehearsed, rehearse
from training.config import Config, UsageError

GPUS_A_NODE = 8


def main(script: ModuleType, argv: list[str]) -> int:
    """Rehearse; print and write the report; return the exit code."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    try:
        seen = run(script, argv)
    except (UsageError, PlacementError, ValueError, OSError) as error:
        print(f"pretrain_llama.py --rehearse: {error}", file=sys.stderr)
        return 2
    made, text = describe(seen)
    print(text)
    if path := seen.config.rehearse.rehearse_json:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(made, file, indent=1)
    return 1 if made["findings"] else 0


def run(script: ModuleType, argv: list[str]) -> Rehearsed:
    """Read the flags and rehearse. Raises UsageError."""
    world = Launch.from_env().world
    config = config_of(script, argv, world)
    asked = config.rehearse
    if asked.rehearse_rank >= world:
        raise UsageError(
            f"--rehearse-rank {asked.rehearse_rank}: ranks of a world of {world} count from 0 to "
            f"{world - 1} (WORLD_SIZE sets the world)"
        )
    if config.model.vocab_size is None and not config.data.tokenizer_model:
        raise UsageError("--rehearse needs --vocab-size where no tokenizer's file is given")
    here = min(GPUS_A_NODE, world)
    launch = Launch(asked.rehearse_rank, world, asked.rehearse_rank % here, here)
    fork = str(script.load_model_file(config.model.model_file).__file__)
    recorder = Recorder("cpu" if asked.rehearse_device == "cpu" else "cuda", fork)
    network, patches = Distributed(recorder, launch.rank), Patches()
    if recorder.device == "cuda":
        install(recorder, {
            "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132,
            "total_memory": 80 * 10**9, "uuid": "",
        })  # fmt: skip
    else:
        Host(recorder).install(patches, network)
    network.install(patches)
    replay.install(recorder, asked.rehearse_full)
    return rehearse(script, config, launch, recorder, network, asked.rehearse_steps, patches)


def config_of(script: ModuleType, argv: list[str], world: int) -> Config:
    """Return the config of these flags. Raises UsageError."""
    argv = script.name_fork(argv)
    file = script.load_model_file(script.model_file(argv))
    own = getattr(file, "extra_args_provider", None)
    # a plan's rules: the files of the data need not be on this machine
    config: Config = script.parse([*argv, "--dry-run"], world, own, script.of_checkpoint)
    return replace(config, run=replace(config.run, dry_run=False))


def describe(seen: Rehearsed) -> tuple[dict[str, Any], str]:
    """Return the report as JSON's types and as text."""
    recorder, step = seen.recorder, seen.recorder.events[seen.first :]
    fullest = memory(recorder.events, seen.kinds(), recorder.device, seen.first)
    made: dict[str, Any] = {
        "rank": seen.grid.rank,
        "world": seen.grid.world_size,
        "device": seen.config.rehearse.rehearse_device,
        "findings": [finding._asdict() for finding in findings(seen)],
        "launches": report.launches(step),
        "memory": {
            "peak_bytes": fullest.peak,
            "by_kind": fullest.by_kind,
            "allocator_rounding_bytes": fullest.rounding,
            "largest": [
                {"bytes": nbytes, "kind": kind, "place": place}
                for nbytes, kind, place in fullest.largest
            ],
        },
        "collectives": report.collectives(step),
        "time": {},
    }
    heading = f"Rehearsal of rank {seen.grid.rank}: {seen.grid}, {made['device']}"
    return made, report.text(made, fullest, heading)
