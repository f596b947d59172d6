# SPDX-License-Identifier: Apache-2.0
"""Let this run's own sentence be the last thing that torchrun leaves on the screen.

torchrun prints a traceback of its own and a report of 15 lines when a rank fails, after all ranks
are gone, and has no switch for it. So a small process outlives the ranks, waits for torchrun's end,
and prints the sentence. It holds nothing of the run but standard error.
"""

import os
import subprocess
import sys
from contextlib import suppress

from mpu.launch import ends_with_this_attempt
from training.untrusted import printable

# argv: torchrun's process id, the sentence. A process that is gone already is no error.
WAIT = """
import os, select, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
try:
    ended = select.poll()
    ended.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN)
    ended.poll(600000)
except ProcessLookupError:
    pass
os.write(2, sys.argv[2].encode() + b"\\n")
"""


def say_last(text: str, error_file: str | None) -> bool:
    """Arrange that `text` is printed when torchrun has ended; return whether it will be.

    error_file: TORCHELASTIC_ERROR_FILE. The first rank of a node that asks has its text printed,
    and for the others it is so too. It is not done where torchrun restarts the ranks, where nobody
    would live to print (torchrun is the container's first process, or SLURM ends a job's leftovers)
    and where torchrun writes the ranks' standard error to a file.
    """
    launcher = os.getppid()
    if not error_file or launcher <= 1 or not ends_with_this_attempt():
        return False
    with suppress(OSError, AttributeError):  # no pidfd, another user's process, no folder
        os.close(os.pidfd_open(launcher))
        ours, theirs = os.fstat(2), os.stat(f"/proc/{launcher}/fd/2")
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
            return False
        try:  # the folder of this attempt, which the ranks of a node share
            mark = os.path.join(os.path.dirname(os.path.dirname(error_file)), "last_word")
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return True
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAIT, str(launcher), printable(text)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # torchrun ends the process groups of its ranks
        )
        return True
    return False
