# SPDX-License-Identifier: Apache-2.0
"""Read the flags of tools/supervise.py, and check them before anything starts."""

import argparse
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from mpu.launch import Launch, run_secret
from training.owned import json_lines, refuse

PORT = 29400  # where supervisors of several nodes meet, unless a flag or MASTER_PORT says otherwise
MEET = 600.0  # seconds for all nodes to come at the start
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # passed on to the ranks
BATCH = {"--global-batch-size", "--step-batch-size-schedule"}


class Mistake(ValueError):
    """The flags do not fit; the text says which."""


def parse(words: list[str] | None, text: str | None) -> tuple[argparse.Namespace, bytes]:
    """Return the flags and the run's secret. Raises Mistake; argparse's own mistakes exit with 2.

    words: those of the command line, or None for this process's. text: what --help begins with.
    """
    e = os.environ
    step = "SLURM_STEP_ID" in e and _count("SLURM_STEP_NUM_NODES", 1) > 1
    nodes = _count("SLURM_STEP_NUM_NODES", 1) if step else 1
    rank, port = (_count("SLURM_NODEID", 0), _count("MASTER_PORT", PORT)) if step else (0, PORT)
    parser = argparse.ArgumentParser(
        "supervise.py", description=text, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--nproc-per-node", type=above(0), default=1, help="places for ranks on this node")
    add("--nnodes", type=above(0), default=nodes, help="nodes, each with a supervisor")
    add("--node-rank", type=above(-1), default=rank, help="this node's number; 0 decides")
    add("--master-addr", default=e.get("MASTER_ADDR") if step else None, help="node 0's address")
    add("--master-port", type=above(0), default=port, help="where supervisors connect, 1 to 65535")
    add("--max-restarts", type=above(-1), default=100, help="restarts in all")
    add("--crash-loop", type=above(0), default=3, metavar="K",
        help="give up after so many faults in a row without a new step")  # fmt: skip
    add("--spares", type=above(-1), default=0, metavar="K", help="places that wait for a fault")
    add("--elastic-dp", action="store_true",
        help="with too few places left, continue with fewer data-parallel ranks")  # fmt: skip
    add("--min-nproc", type=above(0), default=1, help="least ranks in all for --elastic-dp")
    add("--node-wait", type=above(-1), default=20, metavar="SECONDS",
        help="how long a restart waits for a node that was lost")  # fmt: skip
    add("--peer-timeout", type=above(0), default=20, metavar="SECONDS",
        help="silence after which a node counts as lost")  # fmt: skip
    add("--cold", dest="warm", action="store_false",
        help="start each rank as a new Python instead of forking it")  # fmt: skip
    add("--log-json", type=Path, help="log of starts, faults and what they cost")
    add("script", help="the program")
    add("flags", nargs=argparse.REMAINDER, help="its flags")
    o = parser.parse_args(words)
    if o.node_rank >= o.nnodes:
        raise Mistake(f"--node-rank {o.node_rank} is not one of --nnodes {o.nnodes}, from 0")
    if o.nnodes == 1 and not step and (by := _launched()):
        raise Mistake(
            f"{by.launcher} starts {by.world} of these, and --nnodes is 1: give --nnodes, and each "
            "its --node-rank; one supervisor a node starts the node's ranks"
        )
    if o.nnodes > 1 and not o.master_addr:
        raise Mistake(f"--nnodes {o.nnodes} needs --master-addr, the address of node 0")
    o.master_addr = o.master_addr or "127.0.0.1"
    if not 0 < o.master_port < 65536:
        source = "--master-port" if o.master_port != port or not step else "MASTER_PORT"
        raise Mistake(f"{source} {o.master_port}: a port is 1 to 65535")
    if not Path(o.script).is_file():
        raise Mistake(f"{o.script}: there is no such program")
    if o.log_json is not None:
        try:
            refuse("--log-json", o.log_json, json_lines("event"), "the log of a supervisor")
        except ValueError as error:
            raise Mistake(str(error)) from None
    if o.spares >= o.nnodes * o.nproc_per_node:
        raise Mistake(f"--spares {o.spares} leaves no place for a rank")
    if o.elastic_dp and not BATCH & {word.partition("=")[0] for word in o.flags}:
        raise Mistake("--elastic-dp keeps the global batch: give the program --global-batch-size")
    try:
        secret = run_secret(e.get("WEFT_SECRET"), e.get("WEFT_SECRET_FILE"))
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from None
    if not secret and o.nnodes > 1:
        raise Mistake(
            f"--nnodes {o.nnodes}: supervisors must prove that they belong to one run: give all of "
            "them the same WEFT_SECRET or WEFT_SECRET_FILE"
        )
    return o, secret or secrets.token_hex(32).encode()


def _launched() -> Launch | None:
    """Return what a launcher other than srun says of this process as one of several, or None."""
    if {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    try:
        found = Launch.from_env()
    except ValueError as error:
        raise Mistake(str(error)) from None
    return found if found.launcher not in ("", "srun") else None


def _count(name: str, default: int) -> int:
    """Read a count from the environment. Raises Mistake."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise Mistake(f"{name} in the environment is {text!r}: it must be a whole number >= 0")
    return int(text)


def ignore_signals() -> None:
    """Ignore the signals from now on: a run that has ended keeps the exit code that it printed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def above(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers above `least`, for argparse."""

    def number(text: str) -> int:
        value = int(text)
        if value <= least:
            raise argparse.ArgumentTypeError(f"{text} must be above {least}")
        return value

    return number
