# SPDX-License-Identifier: Apache-2.0
"""Start together, or report once why not: to the user, to the ranks that wait, to the launcher.

A mistake is reported before anything is computed. Mostly every rank makes the same one. Where only
one rank does (a file is missing on one machine, flags differ), it tells the others through the
store at which the ranks meet. Later failures are the business of training/faults/monitor.py.
"""

import faulthandler
import hashlib
import json
import os
import platform
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from mpu.comm.transport import CommunicationError
from mpu.connect import share, share_gpus
from mpu.grid import Grid
from mpu.launch import Launch
from training.faults.activity import Activity
from training.faults.hang_watch import HangWatch
from training.faults.monitor import FailureMonitor, exited_early
from training.faults.store import await_key, late_ranks, poll
from training.faults.wire import printable
from training.files.untrusted import sentence
from training.flags.flag_table import live_flags
from training.flags.parallel_rules import WrongWorldError
from training.run import output
from training.run.rendezvous import ABSENT, ACKNOWLEDGED, MARGIN, SHORT, RendezvousError, meet
from training.run.restarts import SIGNAL, End, let_first_speak, tell_next, write_error_file
from training.settings.config import Config, UsageError

PROGRAM = "pretrain_llama.py"
COMPARING = 60.0  # seconds, at most, that ranks which have met wait for one another
# what runs: the sources of these rooms
ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("mpu", "model", "training", "csrc")
KINDS = (".py", ".cpp", ".cc", ".c", ".h", ".cu")


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return {"the file mpu/grid.py": hash, ..., "the version of torch": "2.13.0"}.

    Ranks that differ in one of them may compute different numbers, or wait for each other in
    different places. It takes some 10 ms.
    """
    files = [root / "pretrain_llama.py"]
    for room in ROOMS:
        files += [path for path in sorted((root / room).rglob("*")) if path.suffix in KINDS]
    found = {}
    for path in files:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        found[f"the file {path.relative_to(root).as_posix()}"] = digest
    versions = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
    }
    return found | {f"the version of {name}": text for name, text in versions.items()}


def compare(
    config: Config,
    digests: dict[str, str],
    launch: Launch,
    store: dist.Store,
    activity: Activity | None = None,
) -> None:
    """Raise UsageError, on every rank, where flags or data differ between ranks.

    It needs no collective. digests: {name in messages: hash} of whatever else must be the same.
    Raises RendezvousError where a rank has left since it met the others, or does not go on.
    """
    settings = json.loads(config.canonical_json()) | digests | sources()
    settings["whether WEFT_SECRET is set"] = bool(launch.point.secret)
    mine = json.dumps(settings, sort_keys=True)
    try:
        _exchange(mine, launch, store, activity or Activity(launch))
    except RuntimeError as error:
        why = printable(str(error).splitlines()[0])
        raise RendezvousError(
            f"a rank ended before all ranks had compared their settings: {why}"
        ) from None


def digest_of(settings: str) -> str:
    """Return what a rank tells of its settings, unless it is asked for them."""
    return hashlib.sha256(settings.encode()).hexdigest()


def _exchange(mine: str, launch: Launch, store: dist.Store, activity: Activity) -> None:
    """Send a digest of every rank's settings to rank 0, which asks the first that differs for all
    of them; raise UsageError, on every rank, if they differ.

    Raises RendezvousError, on every rank, where some send none in time.
    """
    rank, world, deadline = launch.rank, launch.world, time.monotonic() + COMPARING
    if rank == 0:
        odd, verdict = _collected(mine, launch, store, activity), ""
        store.set("start/ask", odd)
        if odd and not odd.startswith(ABSENT):
            settings = await_key(
                store, f"start/whole/{odd}", deadline + MARGIN,
                lambda: RendezvousError(f"rank {odd} connected and then ended"), activity=activity,
                wait="start", what=f"rank {odd}, to send its settings", by=int(odd),
            )  # fmt: skip
            verdict = _difference(mine, settings, int(odd))
            store.set("start/verdict", verdict)
    else:

        def from_rank_0(key: str, until: float) -> str:
            return await_key(
                store, key, until, lambda: RendezvousError("rank 0 connected and then ended"),
                activity=activity, wait="start", what="rank 0, to compare the ranks' settings",
            )  # fmt: skip

        store.set(f"start/{rank}", digest_of(mine))
        odd, verdict = from_rank_0("start/ask", deadline + MARGIN), ""
        if odd == str(rank):
            store.set(f"start/whole/{rank}", mine)
        if odd and not odd.startswith(ABSENT):
            verdict = from_rank_0("start/verdict", deadline + 3 * MARGIN)
    if odd.startswith(ABSENT):
        raise RendezvousError(printable(odd.removeprefix(ABSENT)), reported=True)
    if not verdict:
        return
    acknowledged, deadline = store.add("start/heard", 1), time.monotonic() + ACKNOWLEDGED
    while rank == 0 and acknowledged < world and time.monotonic() < deadline:
        time.sleep(0.05)  # rank 0 may be the store itself
        acknowledged = store.add("start/heard", 0)
    raise UsageError(printable(verdict))


def _collected(mine: str, launch: Launch, store: dist.Store, activity: Activity) -> str:
    """Return the first rank whose settings differ from rank 0's, "" if none, or ABSENT and which
    ranks sent none in time.
    """
    others, told, odd = range(1, launch.world), list[int](), ""

    def missing() -> list[int]:
        return [rank for rank in others if not store.check([f"start/{rank}"])]

    def now() -> str:
        late = missing()
        told[:] = told or late
        who = late_ranks(late, store, launch)
        return f"waiting for {who}, to send the settings of the run" if late else ""

    with activity.waiting(
        "waiting for the settings of all ranks",
        now,
        limit=COMPARING,
        over=lambda: f"{late_ranks(told, store, launch)} sent settings",
        on_line=lambda: store.set("late/start", ""),
    ):
        deadline = time.monotonic() + COMPARING
        for other in others:
            theirs = poll(store, f"start/{other}", deadline)
            if theirs is None:
                who = late_ranks(missing() or [other], store, launch)
                return f"{ABSENT}{who} connected and then sent no settings in {COMPARING:.0f} s"
            odd = odd or (str(other) if theirs != digest_of(mine) else "")
    return odd


def _difference(mine: str, theirs: str, other: int) -> str:
    """Return how rank `other` differs from rank 0, in one sentence, or "" where it does not."""
    different = differing(json.loads(mine), json.loads(theirs))
    if not different:
        return ""
    key = min(different, key=lambda key: (not key.startswith("the "), key))  # code first
    here, there = different[key]
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    name = flag if flag in live_flags() else key
    if key.startswith("the file "):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        return f"{key} differs on rank 0 and rank {other}{more}: all must run the same code"
    return (
        f"{name} is {here!r} on rank 0 and {there!r} on rank {other}: all ranks need the same value"
    )


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two ranks differ: {name: (in a, in b)}."""
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


def new_monitor(
    config: Config,
    grid: Grid,
    launch: Launch,
    store: Any,
    error_file: str | None,
    activity: Activity | None = None,
) -> FailureMonitor:
    """Return this rank's end of the failure channel. store: where the ranks met, None for one rank.

    activity: what this rank does, which it tells the others. error_file: where torchrun looks for
    the cause. Raises RendezvousError where it is not joined.
    """
    deadline = 60.0 * config.parallel.distributed_timeout_minutes
    watch = HangWatch(grid.waits, deadline, config.fault.hang_timeout)
    if store is None:
        return FailureMonitor(watch=watch, activity=activity)
    point = launch.point

    def on_failure(cause: str) -> None:
        write_error_file(cause, error_file)

    try:
        return FailureMonitor(
            launch.rank, launch.world, store, point.host, point.secret,
            silence=config.fault.peer_timeout, watch=watch, tell=on_failure, activity=activity,
        )  # fmt: skip
    except CommunicationError as error:
        raise RendezvousError(f"rank {launch.rank}: {error}") from None


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
        c = config.checkpoint
        if c.async_save or (c.save and c.save_hf):
            grid.add_background(timeout)
    except RuntimeError as error:
        raise CommunicationError(f"the ranks did not connect: {error}") from error
    p, lines = config.parallel, []
    if path := p.nccl_communicator_config_path:
        given = ", ".join(f"{axis} {dict(one)}" for axis, one in grid.nccl.items())
        lines.append(f"NCCL settings of {path}: {given if grid.backend == 'nccl' else 'not used'}")
    if device.type == "cpu" and not p.no_shared_memory:
        lines += share(grid, timeout)
    elif device.type == "cuda" and p.tp_comm_overlap in ("auto", "symmetric"):
        lines += share_gpus(grid, device, timeout)
    for line in lines:
        note(line)


def refuse(
    error: Exception,
    launch: Launch,
    code: int,
    error_file: str | None,
    alone: bool = False,
    typed: Sequence[str] = (),
) -> int:
    """Print what is wrong in one sentence, once a node, and return `code`.

    All ranks fail with the same message, so the first rank of a node prints it. The code is 1 where
    ranks stayed away, which is no mistake. alone: the ranks have not compared yet; this one tells
    those that wait in `compare`, or prints where it cannot. typed: the program and its flags; one
    process that needs more ranks prints the line which starts them.
    """
    text = sentence(error)
    if isinstance(error, WrongWorldError) and launch.world == 1 and typed:  # of any length
        text += f"; start them with: {printable(start_line(typed, error.copy))}"
    absent = isinstance(error, RendezvousError)
    code = 1 if absent else code
    untold = isinstance(error, RendezvousError) and not error.reported
    if launch.local_rank == 0 or untold:
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
    write_error_file(text, error_file, End(code, text))
    if alone and launch.world > 1 and not _refuse_others(text, launch) and launch.local_rank:
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
    let_first_speak(error_file)
    return code


def start_line(typed: Sequence[str], ranks: int) -> str:
    """Return the command, quoted for a shell, that starts a program with so many ranks on this
    host, or that lets --dry-run say what they would do.
    """
    if "--dry-run" in typed:
        return f"WORLD_SIZE={ranks} python {shlex.join(typed)}"
    return f"torchrun --standalone --nproc-per-node {ranks} {shlex.join(typed)}"


def _refuse_others(text: str, launch: Launch) -> bool:
    """Tell the ranks that wait in `compare`; return whether they were reached."""
    try:
        meet(SHORT, launch, refused=text)
    except RendezvousError:
        return False
    except UsageError:  # it comes back as everybody's verdict
        return True
    return False


def as_process(main: Callable[[], int], error_file: str | None, program: str = PROGRAM) -> None:
    """Run main(), print the traceback of a bug, flush, and end the process at once.

    program: its name, for the lines about it. Ctrl-C gets a line, and exit code 130.

    The interpreter's shutdown is skipped. In it a failed run may wait for ranks that are gone, and
    a good one may abort: a gloo thread that asks for Python's lock is then unwound through C++ code
    that forbids it ("terminate called without an active exception").

    A model's file or a library that calls os._exit(0) meanwhile ends no run well: it is taken as a
    sys.exit() with a sentence. An exit that native code calls, and os.exec*, are not seen.
    """
    faulthandler.enable()  # a fatal signal, such as SIGBUS, then names the line it came from
    pid, leave = os.getpid(), os._exit

    def exit_early(status: int) -> NoReturn:
        if status % 256 or os.getpid() != pid:  # a failure; a child, which may end as it likes
            if os.getpid() == pid:
                tell_signal(status)
            leave(status)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        text = f"os._exit({status}) was called at {place} before the run was done"
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(text)
        failed(text)
        output.flush()
        leave(1)

    def tell_signal(status: int) -> None:
        if status - SIGNAL in signal.valid_signals():
            name = signal.Signals(status - SIGNAL).name
            tell_next(End(status, f"ended by {name}"), error_file)

    def failed(text: str) -> int:
        print(f"{program}: {printable(text)}", file=sys.stderr)
        write_error_file(text, error_file)
        return 1

    os._exit = exit_early
    try:
        code = main()
    except SystemExit as end:  # --help, a signal, or a model's file that calls exit()
        if isinstance(end.code, int | None):
            text = exited_early(end)
            code = failed(text) if text else (end.code or 0) % 256
            tell_signal(code)
        else:
            code = failed(str(end.code))
    except KeyboardInterrupt:
        code = SIGNAL + signal.SIGINT
        tell_signal(code)
        failed("stopped by Ctrl-C")
    except BaseException as error:  # where Rust panics it is no Exception
        if isinstance(error.__cause__, SystemExit):  # told to the other ranks (FailureMonitor)
            code = failed(str(error))
        else:
            traceback.print_exc()
            write_error_file(f"{type(error).__name__}: {error}", error_file)
            code = 1
    output.flush()
    leave(code)
