# SPDX-License-Identifier: Apache-2.0
"""Run torch's torchrun, without its warning about threads and its traceback.

`make setup` writes .venv/bin/torchrun to run this. All arguments are torch's. A rank without a
given number of threads takes its share of the cores (mpu/launch.py), so torch's default of one
needs no warning. If a rank fails, torch.distributed.run raises; its report is one line here, with
the first rank that failed and its message in TORCHELASTIC_ERROR_FILE, and the exit code is that
rank's. SIGUSR1 is passed to the ranks, too: torch's own torchrun dies of it.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    sys.argv[0] = "torchrun"

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from training.files.untrusted import printable


def last_word(error: ChildFailedError) -> tuple[int, str]:
    """Return the exit code and one line: the message of the rank that failed first, or its end.

    A rank that torchrun ended, or that was killed, left no message: then another rank's is used.
    """
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    for rank, failure in failures:
        message: Any = failure.message  # a str, or {"message": ...} of a rank's error file
        if isinstance(message, dict) and message.get("message"):
            words = printable(str(message["message"]).splitlines()[0])
            return code_of(failure), f"torchrun: rank {rank}: {words}"
    rank, failure = failures[0]
    code = code_of(failure)
    how = f"ended with exit code {code}"
    if code - 128 in signal.valid_signals():
        how = f"was ended by {signal.Signals(code - 128).name}"
    return code, f"torchrun: rank {rank} {how} without a message"


def code_of(failure: ProcessFailure) -> int:
    """Return a rank's exit code as a shell does: 128 + n for signal n."""
    return int(failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode)


def main() -> int:
    """Run torch's torchrun; return the exit code of the rank that failed first (torch's is 1)."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic.multiprocessing"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they repeat our line
    try:
        torchrun()
    except ChildFailedError as error:
        code, words = last_word(error)
        print(words, file=sys.stderr, flush=True)
        return code
    except SignalException as error:
        how = signal.Signals(error.sigval).name
        print(f"torchrun: ended by {how}", file=sys.stderr, flush=True)
        return 128 + int(error.sigval)
    except Exception as error:  # an error of the launcher itself: no rank has started
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"torchrun: {printable(words)}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
