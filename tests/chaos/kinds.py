# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, each with its oracle: what the run must say and do."""

import random
import signal
from collections.abc import Callable, Iterable
from typing import Any

from tests.chaos.fault import (
    HANG_TIMEOUT,
    LAYOUTS,
    PEER_TIMEOUT,
    SAVE_EVERY,
    SLACK,
    Kind,
    Layout,
    Promise,
)

Make = Callable[[random.Random, Layout, int, int], list[dict[str, Any]]]
DP = ("dp 2", "ZeRO 3")
CALLS = {"data": 1, "layer": 4, "backward": 8, "gradient sums": 1, "update": 1, "send": 2}
CALLS |= {"receive": 2, "reading": 1, "evaluation": 1}
RANK_0_ALONE = ("manifest", "renamed", "pruning", "trash")
BEHIND = "--async-save --keep-last-k 2"
HANG = f"--hang-timeout {HANG_TIMEOUT}"
OWN = r"rank {rank} failed first"


def at(point: str, how: str, **more: Any) -> Make:
    """Strike at a call of `point` in the fault's step, or in the first one after it.

    point: one, or several to draw from, parted by commas.
    """

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        place = rng.choice(point.split(", "))
        where = {} if place in ("before the meeting", "connect", "build") else {"from": step}
        call = rng.randint(1, CALLS.get(place, 1))
        return [{"point": place, "call": call, "how": how} | where | more]

    return make


def in_save(phases: Iterable[str], how: str, **more: Any) -> Make:
    """Strike in a phase of the second or third save, "staging" and "staged" included."""

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        phase = rng.choice([p for p in phases if rank == 0 or p not in RANK_0_ALONE])
        save = rng.randint(2, 3)
        if phase in ("staging", "staged"):
            return [{"point": phase, "call": save, "how": how} | more]
        call = rng.randint(1, 4 if phase == "piece" else 1)
        return [{"point": f"save: {phase}", "save": save, "call": call, "how": how} | more]

    return make


def spoil(point: str, what: str, value: str | float, **more: Any) -> Make:
    """Write a wrong number (tests/faults/bad_numbers.py)."""

    def make(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
        number = {"what": what, "value": value, "seed": rng.randrange(2**31)} | more
        if what == "weight" and layout.name == "tp 2" and value == "flip":
            number["named"] = "norm"  # which every rank of the axis holds whole
        return at(point, "spoil", **number)(rng, layout, rank, step)

    return make


def wait(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    """Let every rank wait in its step until the storm has done its part."""
    ranks = range(layout.ranks)
    return [{"point": "data", "call": 1, "how": "wait", "from": step, "rank": r} for r in ranks]


def fill_small_disk(rng: random.Random, layout: Layout, rank: int, step: int) -> Any:
    """Fill the disk `small` of the job's folder."""
    return [{"point": "data", "how": "fill", "from": step, "path": "{dir}/small", "rank": 0}]


# a run that writes more than the page in which a file on a full disk still has room
LONG: dict[str, Any] = {"base": "--train-iters 60 --save-interval 20", "steps": 60}


def full_checkpoint_disk(rng: random.Random, layout: Layout, rank: int, step: int) -> Any:
    """Fill the disk of the checkpoints in the second save; empty it before the third."""
    disk = {"path": "{dir}/saved", "call": 1, "rank": 0}
    full = {"point": "save: start", "save": 2, "how": "fill"} | disk
    return [full, {"point": "save: start", "save": 3, "how": "empty"} | disk]


def jump(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    """Move the clock of a rank, forwards or backwards, by up to ten years."""
    seconds = rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 8.5)
    return at("data", "clock", seconds=seconds)(rng, layout, rank, step)


def nothing(rng: random.Random, layout: Layout, rank: int, step: int) -> list[dict[str, Any]]:
    return []


DIED = Promise(says=OWN + r".*the process died")
SILENT = Promise(says=OWN + r".*no sign of life", limit=PEER_TIMEOUT + SLACK)
HARMLESS = Promise(codes=(0,), who=None)
SAVED = Promise(codes=(75,), who="one", says=r"stopped by .* after iteration \d+ of .*; saved")
GOES_ON = Promise(codes=(0,), who="one", says=r"was not saved: .*rank {rank}: .*training goes on")
UNFOUND = Promise(codes=(0,), who=None, equal=False, honest=True)


def hung(where: str) -> Promise:
    """Return the promise about a rank that lives and does not move."""
    return Promise(says=OWN + ".*" + where, limit=HANG_TIMEOUT + SLACK)


def fallen_back(what: str) -> Promise:
    """Return the promise about a checkpoint that was damaged while nobody ran."""
    return Promise(codes=(-9,), who="restart", says=what)


def dead(name: str, make: Make, **more: Any) -> Kind:
    return Kind(f"kill: {name}", make, DIED, victim=-signal.SIGKILL, **more)


IN_SAVE = ("start", "piece", "shards", "manifest", "renamed")
KILLS = [
    dead("in start-up", at("connect, build", "kill"), share=0.5),
    dead("reading data", at("data", "kill")),
    dead("in forward", at("layer", "kill")),
    dead("in backward", at("backward", "kill")),
    dead("in gradient sums", at("gradient sums", "kill")),
    dead("in the update", at("update", "kill")),
    dead("in an evaluation", at("evaluation", "kill")),
    dead("at a message", at("send, receive", "kill"),
         layouts=("pp 2",)),
    dead("in a save", in_save(IN_SAVE, "kill"), share=3),
    dead("in a save behind the training",
         in_save((*IN_SAVE, "staging", "staged", "pruning", "trash"), "kill"),
         base=BEHIND, share=2),
    Kind("kill: all ranks", at("data, layer, update", "kill all"),
         Promise(codes=(-9,), who=None)),
    Kind("kill: before the meeting", at("before the meeting", "kill"),
         Promise(codes=(1, 2), says=r"rank {rank}\b|MASTER_ADDR", limit=60 + SLACK), share=0.3,
         flags="--distributed-timeout-minutes 1", victim=-signal.SIGKILL),
]  # fmt: skip
STOPS = [
    Kind("stop: for good", at("layer, backward, update", "stop"),
         SILENT, held=True, victim=-signal.SIGKILL),
    Kind("stop: 2 seconds", wait, HARMLESS, outside="pause_a_rank"),
    Kind("stop: all ranks, 2 seconds", wait, HARMLESS, outside="pause_all",
         job={"patient": True}),
    Kind("hang: interpreter's lock held", at("layer", "hold"), SILENT, held=True,
         victim=-signal.SIGKILL),
]  # fmt: skip
ERRORS = [
    Kind("error: exception in a rank",
         at("layer, backward, update", "raise"),
         Promise(says=OWN + r".*RuntimeError: broken on purpose")),
    Kind("error: sys.exit(0) in the loader", at("reading", "exit 0"),
         Promise(codes=(1, 2), says=OWN)),
    Kind("corpus: read error", at("pread", "EIO"),
         Promise(codes=(1, 2), says=OWN + r".*corpus\.bin.*Input/output error")),
]  # fmt: skip
NUMBERS = [
    Kind(f"number: {value} in a {what}", spoil(point, what.split()[0], value),
         Promise(says=r"not finite at iteration {step}\b", who="one"), layouts=layouts, only=only)
    for what, point, layouts, only in (
        ("gradient", "gradient sums", ("tp 2", "pp 2", "dp 2"), None),
        ("output of a layer", "layer", tuple(LAYOUTS), None),
        ("weight", "step", ("tp 2", "pp 2", "dp 2"), None),
    )
    for value in ("nan", "inf")
]  # fmt: skip
DISKS = [
    Kind(f"disk: {how} under a checkpoint", in_save(("piece",), how), GOES_ON)
    for how in ("ENOSPC", "EIO", "EROFS", "ESTALE")
]
DISKS += [
    Kind("disk: short write under a checkpoint",
         lambda r, *a: [{"point": "saving", "call": r.randint(2, 3), "how": "short"}], GOES_ON),
    Kind("disk: full under a checkpoint", full_checkpoint_disk,
         Promise(codes=(0,), who="one", says="was not saved: .*MB are free"),
         job={"disk": "saved", "size": "8m"}),
    Kind("disk: slow under a checkpoint", at("fsync", "slow", seconds=0.2, times=1000), HARMLESS),
    Kind("disk: full under the log", fill_small_disk,
         Promise(codes=(0,), who="one", says=r"(log|small).*No space left"),
         flags="--log-json {dir}/small/log.jsonl", **LONG, job={"disk": "small", "size": "64k"}),
    Kind("disk: full under stdout", fill_small_disk,
         HARMLESS,
         **LONG, job={"disk": "small", "size": "64k", "stdout": "{dir}/small/out.{{}}"}),
    Kind("disk: full under TensorBoard", fill_small_disk,
         Promise(codes=(0,), who="one", says=r"(TensorBoard|small).*No space left"),
         flags="--tensorboard-dir {dir}/small/tb", **LONG, job={"disk": "small", "size": "64k"}),
]  # fmt: skip
DAMAGE = [
    Kind(f"checkpoint: {name}", at("data", "kill all"), fallen_back(r"passed over.*{name}"),
         outside=f"damage_{how}", first=2 * SAVE_EVERY + 1)
    for name, how in (("bit flipped", "flip"), ("file truncated", "truncate"),
                      ("file missing", "remove"))
]  # fmt: skip
SIGNALS = [
    Kind("signal: SIGTERM to one rank", wait, SAVED, outside="sigterm"),
    Kind("signal: a storm of SIGTERM", wait, SAVED, outside="sigterm_storm"),
    Kind("signal: SIGINT to all", wait, SAVED, outside="sigint"),
    Kind("signal: SIGUSR1 to one rank", wait, SAVED, outside="sigusr1"),
    Kind("signal: SIGHUP to all", wait, SAVED, outside="sighup"),
]
CLOCKS = [Kind("clock: jumps", jump, HARMLESS)]
LAUNCHERS = [
    Kind("launcher: torchrun killed", wait, Promise(codes=(-9,), who="one", says="saved: the same"),
         outside="kill_launcher", apart="torchrun", share=0.3),
    Kind("restart: a rank killed under torchrun --max-restarts", at("layer, update", "kill"),
         Promise(codes=(0,), who="one", says=DIED.says), apart="torchrun restarts", share=0.5),
]  # fmt: skip
STRANGERS = [
    Kind("network: garbage on the hub's port", wait, HARMLESS, outside="garbage"),
    Kind("network: 300 idle connections to the hub", wait, HARMLESS, outside="idle_connections"),
]
WIRE = {"base": "--no-shared-memory", "job": {"wire": True}}
APART = Promise(who="both sides", says="rank 0 and rank 1 do not hear each other",
                limit=PEER_TIMEOUT + SLACK)  # fmt: skip
WIRES = [
    Kind("network: partition", wait, APART, outside="partition", **WIRE),
    Kind("network: partition of 2 seconds", wait, HARMLESS, outside="short_partition", **WIRE),
    Kind("network: delay", wait, HARMLESS, outside="delay", **WIRE),
    Kind("network: loss", wait, HARMLESS, outside="loss", **WIRE),
    Kind("network: connections reset", wait, APART, outside="reset", **WIRE),
]
FILES = [
    Kind(
        "corpus: truncated during the run",
        wait,
        Promise(codes=(1, 2), says=r"corpus\.bin", who="one"),
        outside="truncate_corpus",
    ),
    Kind(
        "corpus: overwritten during the run",
        wait,
        Promise(codes=(1, 2), says=r"corpus\.bin", who="one"),
        outside="overwrite_corpus",
    ),
]
FLIPS = [
    Kind("flip: gradient before the sum", spoil("gradient sums", "gradient", "flip"), UNFOUND,
         layouts=("tp 2", "pp 2", "dp 2"), share=0.5),
    Kind("flip: output of a layer", spoil("layer", "output", "flip"), UNFOUND, share=0.5),
    Kind("flip: moment of one owner", spoil("step", "moment", "flip"), UNFOUND,
         layouts=("pp 2", "ZeRO 3"), share=0.5),
    Kind("flip: weight of one owner", spoil("step", "own weight", "flip"), UNFOUND,
         layouts=("ZeRO 3",), share=0.5),
]  # fmt: skip
KINDS = [*KILLS, *STOPS, *ERRORS, *NUMBERS, *DISKS, *DAMAGE, *SIGNALS, *CLOCKS, *STRANGERS]
KINDS += [*LAUNCHERS, *WIRES, *FILES, *FLIPS]
BY_NAME = {kind.name: kind for kind in KINDS}
