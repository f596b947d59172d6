# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank and report: the part of `tools/rehearse.py` that imports torch."""

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from forecast.device_file import Device
from forecast.fit import gpu_of
from forecast.rehearsal import (
    activation_costs,
    guard,
    report,
    triton_kernels,
    workspaces,
)
from forecast.rehearsal.clock import Timing, time_record
from forecast.rehearsal.device import install
from forecast.rehearsal.events import Event
from forecast.rehearsal.findings import findings
from forecast.rehearsal.group import Distributed
from forecast.rehearsal.host import Host
from forecast.rehearsal.memory import memory
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.pipeline_clock import time_pipeline
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.run import Rehearsed, failed, heard_in, rehearse
from forecast.rehearsal.time_report import as_json, chrome_trace, lines
from forecast.rehearsal.world import MOST_RANKS, Exchange, all_ranks
from mpu.launch import Launch
from mpu.param import PlacementError
from mpu.torch_private import require_rehearsal
from training.data.files import write_text
from training.files.owned import json_with, refuse
from training.files.untrusted import sentence
from training.run.model_profile import model_profile
from training.run.pipeline_stages import costs, rank_stages
from training.run.waiting import Progress
from training.settings.config import Config, UsageError
from training.settings.pipeline_schedule import schedule_of

GPUS_A_NODE = 8


def main(script: ModuleType, argv: list[str], progress: Progress | None = None) -> int:
    """Rehearse; print and write the report; return the exit code. progress: counts the steps."""
    progress = progress or Progress()
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    path: str | None = guard.flag(argv, "--rehearse-json")  # known even if reading flags fails
    try:
        for flag, key in (("--rehearse-json", "findings"), ("--rehearse-trace", "traceEvents")):
            if file := guard.flag(argv, flag):
                refuse(flag, file, json_with(key), "a file that this flag wrote")
        require_rehearsal()
        config = read(script, argv)
        path = config.rehearse.rehearse_json
        if config.rehearse.rehearse_all_ranks:
            made, text = all_ranks(partial(run, script), describe, config, progress)
        else:
            made, text = describe(run(script, config, progress=progress))
    except Exception as error:  # reading the flags may raise any, too: it runs the model
        if isinstance(error, (ValueError, PlacementError, OSError, guard.GuardError)) and not (
            of_torch(error)
        ):
            print(f"pretrain_llama.py --rehearse: {sentence(error)}", file=sys.stderr)
            return 2
        made, text = {"findings": [failed(error, "")._asdict()]}, ""
        traceback.print_exc()
    print(text, *report.findings(made), sep="\n")
    if path:
        write_text(path, json.dumps(made, indent=1), json_with("findings"))
    return 1 if made["findings"] else 0


def of_torch(error: BaseException) -> bool:
    """Return whether torch raised an error; its message then does not name flags."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def read(script: ModuleType, argv: list[str], world: int = 0) -> Config:
    """Read the flags. world: number of ranks; 0: from the environment. Raises UsageError."""
    world = world or Launch.from_env().world
    argv = script.name_fork(argv)
    own = getattr(script.load_model_file(script.model_file(argv)), "extra_args_provider", None)
    # with a dry run's rules, the data files need not be on this machine
    config: Config = script.parse(["--dry-run", *argv], world, own, script.of_checkpoint)
    config = replace(config, run=replace(config.run, dry_run=False))
    options = config.rehearse
    if options.rehearse_rank >= world:
        raise UsageError(
            f"--rehearse-rank {options.rehearse_rank}: must be from 0 to {world - 1}, as "
            f"WORLD_SIZE is {world}"
        )
    if config.model.vocab_size is None and not config.data.tokenizer_model:
        raise UsageError("--rehearse needs --vocab-size or --tokenizer-model")
    if options.rehearse_all_ranks and world > MOST_RANKS:
        raise UsageError(
            f"--rehearse-all-ranks: WORLD_SIZE is {world}; at most {MOST_RANKS} ranks can be "
            "rehearsed together"
        )
    return config


def run(
    script: ModuleType,
    config: Config,
    exchange: Exchange | None = None,
    progress: Progress | None = None,
    node: int = GPUS_A_NODE,
    tries: bool = True,
) -> Rehearsed:
    """Rehearse a rank. The process must not have rehearsed before. Raises UsageError.

    node: GPUs of a node. tries: whether to make a run's trial calls and warm-up first.
    """
    world, options = config.parallel.world_size, config.rehearse
    here = min(node, world)
    launch = Launch(options.rehearse_rank, world, options.rehearse_rank % here, here)
    file = script.load_model_file(config.model.model_file)
    recorder = Recorder("cpu" if options.rehearse_device == "cpu" else "cuda", str(file.__file__))
    network, patches = Distributed(recorder, launch.rank), Patches()
    network.exchange = exchange
    if exchange is None:
        network.answers = heard_in(config, script, launch.rank)
    if recorder.device == "cuda":
        guard.check(torch)
        device = gpu_of(config)
        major, minor = device.capability
        install(recorder, {
            "name": device.name, "major": major, "minor": minor, "uuid": "",
            "multi_processor_count": int(device["sms"]), "total_memory": int(device["memory"]),
        }, config.run.deterministic_mode)  # fmt: skip
        triton_kernels.install(recorder, launch.rank)
    else:
        Host(recorder).install(patches, network)
    network.install(patches)
    return rehearse(
        script, config, launch, recorder, network, steps=options.rehearse_steps,
        patches=patches, progress=progress, tries=tries,
    )  # fmt: skip


NO_LAYERS = (
    "not predicted: the times of all layers follow from those of this rank, which has none; give "
    "another --rehearse-rank"
)


def describe(seen: Rehearsed) -> tuple[dict[str, Any], str]:
    """Return the report as JSON's types and as text."""
    recorder, step = seen.recorder, seen.step()
    fullest = memory(recorder.events, seen.kinds(), recorder.device, seen.first)
    by_kind, lacking, more = dict(fullest.by_kind), list[str](), seen.batches_left_out()
    by_kind["other"] = by_kind.get("other", 0) + more
    if recorder.device == "cuda":
        device = gpu_of(seen.config)
        of_matmuls = by_kind[workspaces.OF_MATMULS] = workspaces.of_matmuls(step, device.major)
        more += of_matmuls
        lacking = workspaces.not_counted(recorder.events)
    times: list[str] = []
    of_layers: list[str] = []
    made: dict[str, Any] = {
        "rank": seen.grid.rank,
        "world": seen.grid.world_size,
        "device": seen.config.rehearse.rehearse_device,
        "findings": [finding._asdict() for finding in findings(seen)],
        "launches": report.launches(step),
        "memory": {
            "peak_bytes": fullest.peak + more,
            "by_kind": by_kind,
            "not_counted": lacking,
            "allocator_rounding_bytes": fullest.rounding,
            "largest": [
                {"bytes": nbytes, "kind": kind, "place": place}
                for nbytes, kind, place in fullest.largest
            ],
        },
        "collectives": report.collectives(step),
        "time": {},
        "activations": {},
        "cuda_graph": {},  # always empty: Weft has no CUDA graphs
    }
    # a finding may mean that the step is incomplete, except a "stand-in"
    kinds = {finding["kind"] for finding in made["findings"]}
    timed = recorder.device == "cuda" and kinds <= {"stand-in"}
    provider = seen.script.model_provider
    stages = rank_stages(seen.config, provider, seen.grid.pp.rank)
    if timed and not any(stage.layers for stage in stages):
        times = [f"  {NO_LAYERS}"]
    elif timed:
        timing, *others = (time_of(seen, end, step) for end in device.ends())
        other = others[0] if others else None
        made["time"] = as_json(timing, other)
        times = lines(timing, device, other)
        table = activation_costs.rows(seen.config, provider, step, device)
        moved = activation_costs.carried(step, device, timing)
        made["activations"] = activation_costs.as_json(table, moved)
        of_layers = activation_costs.lines(table, moved)
        if path := seen.config.rehearse.rehearse_trace:
            write_text(path, json.dumps(chrome_trace(timing)), json_with("traceEvents"))
    heading = f"Rehearsal of rank {seen.grid.rank}: {seen.grid}, {made['device']}"
    return made, report.text(made, heading, times, of_layers)


def time_of(seen: Rehearsed, device: Device, step: Sequence[Event]) -> Timing:
    """Return the timing of the last step, with all its micro-batches, on a device."""
    config, grid, provider = seen.config, seen.grid, seen.script.model_provider
    batches = seen.micro_batches
    tokens = batches * config.batch.micro_batch_size * grid.dp.size * config.model.seq_length
    flops = model_profile(config, provider).flops * tokens / grid.world_size
    dtype = str(config.run.dtype).removeprefix("torch.")
    trace = bool(config.rehearse.rehearse_trace)
    if grid.pp.size == 1:
        if config.parallel.optimizer_state_offload:  # its copies overlap the next step's forward
            step = [*seen.earlier(), *step]
        return time_record(step, device, flops, dtype, rank=grid.rank, trace=trace)
    schedule, work = schedule_of(config, batches), costs(config, provider)
    of_layers = costs(config, provider, ends=False)
    return time_pipeline(
        step, device, schedule, grid.pp.rank, work, of_layers, flops=flops, dtype=dtype,
        rank=grid.rank, trace=trace,
    )  # fmt: skip
