# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, each with its oracle: what the run must say and do."""

import signal
from typing import Any

from tests.chaos.fault import (
    DENSE,
    HANG_TIMEOUT,
    PEER_TIMEOUT,
    SAVE_EVERY,
    SLACK,
    Kind,
    Promise,
)
from tests.chaos.makers import (
    Make,
    at,
    everywhere,
    fill_small_disk,
    full_checkpoint_disk,
    in_save,
    jump,
    spike,
    spoil,
    wait,
)

DP = ("dp 2", "ZeRO 3")
BEHIND = "--async-save --keep-last-k 2"
HANG = f"--hang-timeout {HANG_TIMEOUT}"
OWN = r"rank {rank} failed first"
# a run that writes more than the page in which a file on a full disk still has room
LONG: dict[str, Any] = {"base": "--train-iters 60 --save-interval 20", "steps": 60}
# a kill may look like a reset to the survivors; which rank it is, they know
DIED = Promise(says=OWN + r".*(the process died|lost contact \(dead, )")
SILENT = Promise(says=OWN + r".*no heartbeat", limit=PEER_TIMEOUT + SLACK)
HARMLESS = Promise(codes=(0,), who=None)
SAVED = Promise(codes=(75,), who="one", says=r"stopped by .* after iteration \d+ of .*; saved")
GOES_ON = Promise(codes=(0,), who="one", says=r"was not saved: .*rank {rank}: .*training continues")
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
    dead("among ranks that share out experts", at("layer, backward, gradient sums, update", "kill"),
         layouts=("ep 2",)),
    dead("in a save of experts", in_save(IN_SAVE, "kill"), layouts=("ep 2",)),
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
COMPUTING = "rank {rank} hangs in the phase step: computing at "
HANGS = [
    Kind(f"hang: {name}", make, hung(where), flags=HANG)
    for name, make, where in (
        ("in the data loader", at("reading", "stall"), "in the data loader"),
        ("in forward", at("layer", "stall"), COMPUTING),
        ("in backward", at("backward", "stall"), COMPUTING),
        ("before a collective", at("gradient sums, update", "stall"), COMPUTING),
        ("in a save", in_save(("piece", "shards"), "stall"), "rank {rank} hangs in the phase save"),
    )
]  # fmt: skip
HANGS += [
    Kind("hang: all ranks at once", everywhere("layer, update", "stall"),
         Promise(says="ranks [01] and [01], which is every rank, hang", who="one",
                 limit=HANG_TIMEOUT + SLACK), flags=HANG)
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
SPOILT = r"not finite at iteration {step}: "
ONCE = Promise(says=SPOILT + ".*the fault was transient", who="one")
OUTPUT = r".*in the output of \S+ \(\w+\).*micro-batch.*sample.*on rank {rank}"
LASTING = Promise(says=SPOILT + OUTPUT, who="one")
WEIGHT = Promise(says=SPOILT + r".*in the weight {bare} \(.*on rank {rank}", who="one")
SPIKE = "a spike at iteration {step}: .*loss.*z-score"
NUMBERS = [
    Kind(f"number: {value} in a {what}", make, promise, layouts=layouts)
    for value in ("nan", "inf")
    for what, make, promise, layouts in (
        ("gradient", spoil("gradient sums", "gradient", value), ONCE, ("tp 2", "pp 2", "dp 2")),
        ("layer's output", spoil("layer", "output", value), ONCE, DENSE),
        ("weight", spoil("step", "weight", value), WEIGHT, ("tp 2", "pp 2", "dp 2")),
    )
]  # fmt: skip
NUMBERS += [
    Kind("number: nan in a layer's output, again and again",
         spoil("layer", "output", "nan", times=10**6), LASTING),
    Kind("number: nan in a gradient, skipped", at("backward", "nan"),
         Promise(codes=(0,), who="one", says=SPOILT, equal=False), flags="--on-nan skip"),
    Kind("number: nan in a layer's output, rewound", spoil("layer", "output", "nan"),
         Promise(codes=(0,), who="one", says=SPOILT + ".*going back from", equal=False),
         flags="--on-nan rewind"),
    Kind("number: the loss a thousandfold", spike, Promise(who="one", says=SPIKE),
         flags="--on-spike stop", first=36, **LONG),
    Kind("number: the loss a thousandfold, rewound", spike,
         Promise(codes=(0,), who="one", says=SPIKE + ".*going back", equal=False),
         flags="--on-spike rewind", first=36, **LONG),
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
         flags="--log-json {dir}/small/log.jsonl", log=False, **LONG,
         job={"disk": "small", "size": "64k"}),
    Kind("disk: full under stdout", fill_small_disk,
         HARMLESS,
         **LONG, job={"disk": "small", "size": "64k", "stdout": "{dir}/small/out.{{}}"}),
    Kind("disk: full under TensorBoard", fill_small_disk,
         Promise(codes=(0,), who="one", says=r"(TensorBoard|small).*No space left"),
         flags="--tensorboard-dir {dir}/small/tb", **LONG, job={"disk": "small", "size": "64k"}),
]  # fmt: skip
DAMAGE = [
    Kind(f"checkpoint: {name}", at("data", "kill all"), fallen_back(r"is skipped.*{name}"),
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
STOPPED = Promise(codes=(-9,), who="one", says="saved: the same command resumes")
BACK = Promise(codes=(0,), who="one", says=DIED.says, limit=60.0)
LAUNCHERS = [
    Kind("launcher: torchrun killed", wait, STOPPED, outside="kill_launcher", apart="torchrun",
         share=0.4),
    Kind("restart: killed, torchrun --max-restarts", at("layer, update", "kill"), BACK,
         apart="torchrun restarts", share=0.4),
    Kind("restart: hangs, torchrun --max-restarts", at("layer, update", "stall"),
         Promise(codes=(0,), who="one", says="rank {rank} hangs", limit=60.0),
         flags=HANG, apart="torchrun restarts", share=0.4),
]  # fmt: skip
STRANGERS = [
    Kind("network: garbage on the hub's port", wait, HARMLESS, outside="garbage"),
    Kind("network: 300 idle connections to the hub", wait, HARMLESS, outside="idle_connections"),
]
WIRE = {"base": "--no-shared-memory", "job": {"wire": True}}
BOTH = "rank 0 and rank 1 lost contact"
APART = Promise(who="both sides", says=BOTH, limit=PEER_TIMEOUT + SLACK)
LINK = BOTH + r"|rank (\d) failed first.*rank (?!\1)\d lost it, too"
RESET = Promise(who="both sides", says=LINK, limit=PEER_TIMEOUT + SLACK)
WIRES = [
    Kind("network: partition", wait, APART, outside="partition", **WIRE),
    Kind("network: partition of 2 seconds", wait, HARMLESS, outside="short_partition", **WIRE),
    Kind("network: delay", wait, HARMLESS, outside="delay", **WIRE),
    Kind("network: loss", wait, HARMLESS, outside="loss", **WIRE),
    # so many steps that some are left when the connections are reset
    Kind("network: connections reset", wait, RESET, outside="reset", job=WIRE["job"],
         base=f"{WIRE['base']} {LONG['base']}", steps=LONG["steps"]),
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
# two ranks hold it, so the pair is named; where one of them is singled out, it is the right one
REPLICAS = "replicas differ at iteration .*{name} differs on rank 0 or rank 1"
REPLICAS += "(?!.*rank {other} had other bits)"
# a flip that makes a number as large as an infinity is noticed by the norm first
REPLICAS += r"|not finite at iteration .*(weight {bare} \(|output of {module} ).*on rank {rank}"
FLIPS = [
    Kind(f"flip: {what} that other ranks hold too{more}", spoil("step", what, flip),
         Promise(codes=codes, says=REPLICAS, who="one"), layouts=("tp 2", "dp 2"), share=4,
         flags=f"--check-replicas 2{flag}", log=not flag)  # steps made again are not logged
    for what in ("weight", "moment")
    for more, codes, flag, flip in (
        ("", (1,), "", "flip"),
        (", rewound", (0,), " --on-replica-mismatch rewind", "small flip"),  # no infinity
    )
]  # fmt: skip
FLIPS += [
    Kind("flip: gradient before the sum", spoil("gradient sums", "gradient", "flip"), UNFOUND,
         layouts=("tp 2", "pp 2", "dp 2")),
    Kind("flip: layer's output", spoil("layer", "output", "flip"), UNFOUND),
    Kind("flip: moment of one owner", spoil("step", "moment", "flip"), UNFOUND,
         layouts=("pp 2", "ZeRO 3")),
    Kind("flip: weight of one owner", spoil("step", "own weight", "flip"), UNFOUND,
         layouts=("ZeRO 3",)),
]  # fmt: skip
KINDS = [*KILLS, *STOPS, *HANGS, *ERRORS, *NUMBERS, *DISKS, *DAMAGE, *SIGNALS, *CLOCKS, *STRANGERS]
KINDS += [*LAUNCHERS, *WIRES, *FILES, *FLIPS]
BY_NAME = {kind.name: kind for kind in KINDS}
