# SPDX-License-Identifier: Apache-2.0
"""Rehearse every rank of a small world, each in its own process, and match their transfers."""

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from forecast.rehearsal.match import MATCHED, Chains, chains_of, match
from forecast.rehearsal.run import Rehearsed
from mpu.comm.transport import Axis
from training.run.waiting import Progress
from training.settings.config import Config

MOST_RANKS = 16
AT_ONCE = 2


class RankReport(NamedTuple):
    """The result of a rank's process: the events to match with other ranks', and its report."""

    events: list[Any]
    failed: bool
    made: dict[str, Any]
    text: str
    chains: Chains


class Exchange:
    """Exchanges the bytes that ranks gather at start-up (gather_bytes), through files.

    turns: a semaphore that limits how many ranks run at a time; a rank that waits releases it.
    """

    def __init__(self, folder: Path, rank: int, turns: Any) -> None:
        self.folder, self.rank, self.turns = folder, rank, turns
        self._rounds: Counter[tuple[int, ...]] = Counter()

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        unfinished = self.folder / f"{name}.part"
        unfinished.write_bytes(data)
        os.replace(unfinished, self.folder / name)

    def gather(self, data: bytes, axis: Axis) -> list[bytes]:
        """Return the bytes of each rank of an axis; this rank's for all if another has ended."""
        self._rounds[axis.ranks] += 1
        name = f"{axis.ranks} {self._rounds[axis.ranks]} of ".replace(" ", "_")
        self.write(f"{name}{self.rank}", data)
        self.turns.release()
        try:
            while not all((self.folder / f"{name}{rank}").exists() for rank in axis.ranks):
                if any((self.folder / f"ended_{rank}").exists() for rank in axis.ranks):
                    return [data] * axis.size
                time.sleep(0.01)
        finally:
            self.turns.acquire()
        return [(self.folder / f"{name}{rank}").read_bytes() for rank in axis.ranks]


def all_ranks(
    run: Callable[[Config, Exchange], Rehearsed],
    describe: Callable[[Rehearsed], tuple[dict[str, Any], str]],
    config: Config,
    progress: Progress,
) -> tuple[dict[str, Any], str]:
    """Return the report of the requested rank, with the findings on and between all ranks.

    run, describe: rehearse a rank and report on it; called in a process forked from this one.
    progress: counts the ranks.
    """
    world, context = config.parallel.world_size, multiprocessing.get_context("fork")
    turns = context.Semaphore(AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="weft-rehearsal-") as name:
        folder = Path(name)

        def work(rank: int, connection: Any) -> None:
            turns.acquire()
            exchange = Exchange(folder, rank, turns)
            options = replace(config.rehearse, rehearse_rank=rank)
            if rank != config.rehearse.rehearse_rank:
                options = replace(options, rehearse_trace=None)
            result: Any
            try:
                seen = run(replace(config, rehearse=options), exchange)
                events = [e for e in seen.recorder.events if isinstance(e, MATCHED)]
                result = RankReport(
                    events, seen.failure is not None, *describe(seen), chains_of(seen.recorder)
                )
            except Exception as error:
                result = error
            except BaseException as error:  # a model's file may call sys.exit()
                result = RuntimeError(f"rank {rank} ended with {error!r}")
            exchange.write(f"ended_{rank}", b"")
            turns.release()
            connection.send(result)
            os._exit(0)  # at once, as threads of the trainer may still be waiting

        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=work, args=(rank, pipe[1])) for rank, pipe in enumerate(pipes)
        ]
        for process, (_, connection) in zip(processes, pipes, strict=True):
            process.start()
            connection.close()
        every: dict[int, Any] = {}
        progress.begin("", world, "ranks")
        while len(every) < world:
            left = [rank for rank in range(world) if rank not in every]
            wait([each for n in left for each in (pipes[n][0], processes[n].sentinel)])
            for rank in left:
                ended = processes[rank].exitcode is not None
                if pipes[rank][0].poll():  # other processes have the pipe too: no end of file comes
                    every[rank] = pipes[rank][0].recv()
                    progress.add()
                elif ended:
                    for process in processes:
                        process.kill()
                    raise RuntimeError(f"the process of rank {rank} ended without a result")
        for process in processes:
            process.join()
    results = [every[rank] for rank in range(world)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return together(results, config.rehearse.rehearse_rank)


def together(every: list[RankReport], rank: int) -> tuple[dict[str, Any], str]:
    """Return a rank's report with the findings of all ranks and of their transfers."""
    made, text = every[rank].made, every[rank].text
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in every:
        for finding in one.made["findings"]:
            found.setdefault((finding["kind"], finding["place"], finding["also"]), finding)
    if not any(one.failed for one in every):  # peers of a failed rank would seem to deadlock
        for between in match([one.events for one in every], [one.chains for one in every]):
            found.setdefault((between.kind, between.place, between.also), between._asdict())
    return {**made, "findings": list(found.values())}, text
