# SPDX-License-Identifier: Apache-2.0
"""Start together, or report once why not: to the user, to the ranks that wait, to the launcher.

A mistake is reported before anything is computed. Mostly every rank makes the same one. Where only
one rank does (a file is missing on one machine, flags differ), it tells the others through the
store at which the ranks meet. Later failures are the business of mpu/comm/failure_monitor.py.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpu.comm.transport import CommunicationError
from mpu.connect import share, share_gpus
from mpu.grid import Grid, Launch
from training.config import Config, UsageError
from training.flags.table import known_flags
from training.run import output
from training.untrusted import sentence


class MeetingError(UsageError):
    """Not all ranks came to MASTER_ADDR:MASTER_PORT in time."""


SHORT = timedelta(seconds=5)  # how long a rank with a mistake looks for the others
HEARD = 5.0  # seconds, at most, that rank 0 waits for all others to read why nothing starts


def compare(
    config: Config, digests: dict[str, str], rank: int, world: int, store: dist.Store
) -> None:
    """Raise UsageError, on every rank, where flags or data differ between ranks.

    It needs no collective. digests: {name in messages: hash} of whatever else must be the same.
    """
    settings = json.loads(config.canonical_json()) | digests
    try:
        _exchange(json.dumps({"settings": settings}), rank, world, store)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"a rank left, or never came, before all had compared: {why}") from None


def _exchange(mine: str, rank: int, world: int, store: dist.Store) -> None:
    """Send every rank's text to rank 0; raise UsageError, on every rank, if it finds a mistake."""
    store.set(f"weft/start/{rank}", mine)
    if rank == 0:
        verdict = (
            "" if "refused" not in json.loads(mine) else f"rank 0: {json.loads(mine)['refused']}"
        )
        for other in range(1, world):
            if not verdict:
                verdict = _difference(mine, store.get(f"weft/start/{other}").decode(), other)
        store.set("weft/start/verdict", verdict)
    verdict = store.get("weft/start/verdict").decode()
    if not verdict:
        return
    heard, deadline = store.add("weft/start/heard", 1), time.monotonic() + HEARD
    while rank == 0 and heard < world and time.monotonic() < deadline:
        time.sleep(0.05)  # rank 0 may be the store itself
        heard = store.add("weft/start/heard", 0)
    raise UsageError(verdict)


def _difference(mine: str, theirs: str, other: int) -> str:
    """Return how rank `other` differs from rank 0, in one sentence, or "" where it does not."""
    answer = json.loads(theirs)
    if "refused" in answer:
        return f"rank {other}: {answer['refused']}"
    different = differing(json.loads(mine)["settings"], answer["settings"])
    if not different:
        return ""
    key, (here, there) = next(iter(different.items()))
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    name = flag if flag in known_flags() else key
    return (
        f"{name} is {here!r} on rank 0 and {there!r} on rank {other}: "
        "all ranks must be given the same"
    )


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two ranks differ: {name: (in a, in b)}."""
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


def meet(timeout: timedelta, launch: Launch) -> dist.Store:
    """Open the store at MASTER_ADDR:MASTER_PORT, where the ranks meet. Raises MeetingError."""
    try:
        return next(dist.rendezvous("env://", launch.rank, launch.world, timeout=timeout))[0]
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise MeetingError(
            f"the ranks did not all meet at MASTER_ADDR:MASTER_PORT: {text}"
        ) from None


def connect(
    config: Config,
    grid: Grid,
    device: torch.device,
    store: Any,
    timeout: timedelta,
    note: Callable[[str], None],
) -> None:
    """Join the process groups, then set up memory that ranks share. Raises CommunicationError.

    On a CPU it is the host's shared memory; on GPUs it is what the overlap kernels write through,
    if --tp-comm-overlap asks for them. note: called with a line about each axis.
    """
    try:
        grid.connect(device, store, timeout)
        if config.checkpoint.async_save:
            grid.add_background(timeout)
    except RuntimeError as error:
        raise CommunicationError(f"the ranks did not connect: {error}") from error
    p, lines = config.parallel, []
    if device.type == "cpu" and not p.no_shared_memory:
        lines = share(grid, timeout)
    elif device.type == "cuda" and p.tp_comm_overlap in ("auto", "symmetric"):
        lines = share_gpus(grid, device, timeout)
    for line in lines:
        note(line)


def refuse(
    error: Exception, launch: Launch, code: int, error_file: str | None, alone: bool = False
) -> int:
    """Print what is wrong in one sentence, once a node, and return `code`.

    All ranks fail with the same message, so the first rank of a node prints it. alone: the ranks
    have not compared yet; this one tells those that wait in `compare`, or prints where it cannot.
    """
    text = sentence(error)
    tell_launcher(text, error_file)
    if launch.local_rank == 0:
        print(f"pretrain_llama.py: {text}", file=sys.stderr, flush=True)
    if alone and launch.world > 1 and not _tell(text, launch) and launch.local_rank:
        print(f"pretrain_llama.py: {text}", file=sys.stderr, flush=True)
    return code


def _tell(text: str, launch: Launch) -> bool:
    """Tell the ranks that wait in `compare`; return whether they were reached."""
    try:
        _exchange(json.dumps({"refused": text}), launch.rank, launch.world, meet(SHORT, launch))
    except UsageError as error:  # it comes back as everybody's verdict
        return not isinstance(error, MeetingError)
    except (ValueError, RuntimeError):
        return False
    return False


def tell_launcher(text: str, error_file: str | None) -> None:
    """Write the cause to TORCHELASTIC_ERROR_FILE, if any, for the end of torchrun's report."""
    if error_file:
        more = {"timestamp": str(int(time.time())), "py_callstack": text}
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def as_process(main: Callable[[], int], error_file: str | None) -> None:
    """Run main(), print the traceback of a bug, flush, and end the process at once.

    The interpreter's shutdown is skipped. In it a failed run may wait for ranks that are gone, and
    a good one may abort: a gloo thread that asks for Python's lock is then unwound through C++ code
    that forbids it ("terminate called without an active exception").
    """
    faulthandler.enable()  # a fatal signal, such as SIGBUS, then names the line it came from
    try:
        code = main()
    except SystemExit as end:  # --help, or a signal
        code = end.code if isinstance(end.code, int) else 0
    except Exception as error:
        traceback.print_exc()
        tell_launcher(f"{type(error).__name__}: {error}", error_file)
        code = 1
    output.flush()
    os._exit(code)
