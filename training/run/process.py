# SPDX-License-Identifier: Apache-2.0
"""How the process of a rank ends: a mistake in one sentence, a bug with its traceback, exit codes.

A user's mistake is reported before anything is computed. Usually every rank finds the same one. If
only one rank does (a file is missing on one machine, flags differ), it notifies the others through
the rendezvous store. training/faults/monitor.py handles later failures.
"""

import faulthandler
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from typing import NoReturn

from mpu.launch import Launch
from training.faults.monitor import exited_early
from training.files.untrusted import printable, sentence
from training.flags.parallel_rules import WrongWorldError
from training.run import output
from training.run.rendezvous import SHORT, RendezvousError, meet
from training.run.restarts import SIGNAL, End, let_first_speak, tell_next, write_error_file
from training.settings.config import UsageError

PROGRAM = "pretrain_llama.py"


def refuse(
    error: Exception,
    launch: Launch,
    code: int,
    error_file: str | None,
    alone: bool = False,
    typed: Sequence[str] = (),
) -> int:
    """Print the error in one sentence, once per node, and return `code`.

    All ranks fail with the same message, so the first rank of a node prints it. The code is 1 if
    ranks did not connect, as that is not a mistake. alone: the ranks have not met yet; this one
    notifies those that wait in `meet`, or prints the message itself if it cannot. typed: the
    program and its flags; a single process that needs more ranks prints the command that starts
    them.
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
    """Return the command, quoted for a shell, that starts a program with this number of ranks on
    this host, or that makes the dry run of such a start.
    """
    if "--dry-run" in typed:
        return f"WORLD_SIZE={ranks} python {shlex.join(typed)}"
    return f"torchrun --standalone --nproc-per-node {ranks} {shlex.join(typed)}"


def _refuse_others(text: str, launch: Launch) -> bool:
    """Send the refusal to the ranks that wait in `meet`; return whether it reached them."""
    if not (launch.point.host and launch.point.port):
        return False
    try:
        meet(SHORT, launch, refused=text)
    except RendezvousError:
        return False
    except UsageError:  # all ranks get this refusal as the verdict
        return True
    return False


def as_process(main: Callable[[], int], error_file: str | None, program: str = PROGRAM) -> None:
    """Run main(), print the traceback of a bug, flush, and end the process at once.

    program: its name, for messages. Ctrl-C prints a line and gives exit code 130.

    The interpreter's shutdown is skipped: there a failed run may wait for ranks that are gone, and
    a successful one may abort, as a gloo thread that asks for the GIL is unwound through C++ code
    that forbids it ("terminate called without an active exception"). torchrun --run-path calls the
    program as a function and waits until it returns, so a successful run returns there.

    os._exit(0), called meanwhile by a model's file or a library, does not end the run as a success:
    it raises SystemExit with a message, or exits with code 1 if another thread calls it. Exits from
    native code and os.exec* are not detected.
    """
    faulthandler.enable()  # a fatal signal, such as SIGBUS, then prints the line it came from
    pid, leave = os.getpid(), os._exit

    def exit_early(status: int) -> NoReturn:
        if status % 256 or os.getpid() != pid:  # a failure, or a child process
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
    except BaseException as error:  # a Rust panic is not an Exception
        if isinstance(error.__cause__, SystemExit):  # FailureMonitor has sent it to the other ranks
            code = failed(str(error))
        else:
            traceback.print_exc()
            write_error_file(f"{type(error).__name__}: {error}", error_file)
            code = 1
    output.flush()
    if code or not (error_file and parent_process()):
        leave(code)
