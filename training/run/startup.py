# SPDX-License-Identifier: Apache-2.0
"""Say what is wrong, once and to everybody: to the person, to the ranks that wait, to the launcher.

A mistake is answered before anything is computed. Mostly every rank makes the same one; where only
one does (a file that is missing on one machine, flags that differ), it tells the others through the
store at which ranks meet. What goes wrong later is the business of mpu/comm/failure_monitor.py.
"""

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


class MeetingError(UsageError):
    """The ranks did not all come."""


SHORT = timedelta(seconds=5)  # how long a refused rank looks for others
HEARD = 5.0  # seconds that rank 0 stays, at most, so that all others can read why nothing starts


def compare(
    config: Config, digests: dict[str, str], rank: int, world: int, store: dist.Store
) -> None:
    """Refuse flags or data that differ between ranks, on all of them, before the first collective.

    digests: {what a person calls it: hash} of whatever else must be the same everywhere.
    """
    settings = json.loads(config.canonical_json()) | digests
    try:
        _exchange(json.dumps({"settings": settings}), rank, world, store)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"a rank left, or never came, before all had compared: {why}") from None


def _exchange(mine: str, rank: int, world: int, store: dist.Store) -> None:
    """Bring every rank's text to rank 0, which says on all ranks what is wrong with them."""
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
    """Say how rank `other` differs from rank 0, in one sentence; nothing where it does not."""
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
    """Name the settings in which two ranks differ: {name: (in a, in b)}."""
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
    """Join the process groups and the memory that ranks share: on a CPU that of one host, on GPUs
    what the overlap kernels write through, where they are asked for.
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
    """Say what is wrong in one sentence, once a node, and return `code`.

    Every rank fails with the same words, or has been told whose they are, so the first of a node
    speaks for it. alone: nobody has compared anything yet, and the others may wait for this rank.
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    tell_launcher(text, error_file)
    if launch.local_rank == 0:
        print(f"pretrain_llama.py: {text}", file=sys.stderr, flush=True)
    if alone and launch.world > 1 and not _tell(text, launch) and launch.local_rank:
        print(f"pretrain_llama.py: {text}", file=sys.stderr, flush=True)
    return code


def _tell(text: str, launch: Launch) -> bool:
    """Let the ranks that wait in `compare` know; return whether they do."""
    try:
        _exchange(json.dumps({"refused": text}), launch.rank, launch.world, meet(SHORT, launch))
    except UsageError as error:  # it comes back as everybody's verdict
        return not isinstance(error, MeetingError)
    except (ValueError, RuntimeError):
        return False
    return False


def tell_launcher(text: str, error_file: str | None) -> None:
    """Leave the cause where torchrun looks for it (TORCHELASTIC_ERROR_FILE), so that its report
    ends with it.
    """
    if error_file:
        more = {"timestamp": str(int(time.time())), "py_callstack": text}
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def as_process(main: Callable[[], int], error_file: str | None) -> None:
    """Run main() and end the process at once, flushed: a bug leaves its traceback.

    The interpreter's own end is left out. There a failed run may wait for ranks that are gone, and
    a good one may abort: a gloo thread that wants Python's lock then is unwound through C++ code
    that cannot be ("terminate called without an active exception").
    """
    try:
        code = main()
    except SystemExit as end:  # --help, or a signal
        code = end.code if isinstance(end.code, int) else 0
    except Exception as error:
        traceback.print_exc()
        tell_launcher(f"{type(error).__name__}: {error}", error_file)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
