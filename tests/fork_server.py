# SPDX-License-Identifier: Apache-2.0
"""Begin multiprocessing's fork server as a copy of this process.

As multiprocessing begins it, a fork server is a new Python, which imports the program again: that
takes longer than most tests.
"""

import faulthandler
import gc
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, util
from unittest.mock import patch


def begin() -> None:
    """Fork the server from this process, in which torch has no threads yet and no CUDA.

    Each later `multiprocessing.get_context("forkserver")` of this process uses it.
    """
    with patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()


def _forked(executable: bytes, args: Sequence[str], files: Sequence[int]) -> int:
    """Take the place of util.spawnv_passfds: run the code behind -c in a fork; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # of threads: xdist has one that reads from the controller
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            _forget(files)
            exec(args[-1])
        finally:
            os._exit(0)
    return pid


def _forget(files: Sequence[int]) -> None:
    """Leave what pytest has put into this process, and its files but for these."""
    faulthandler.disable()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [x for x in sys.meta_path if not type(x).__module__.startswith("_pytest")]
    last = 2
    for file in sorted(files):
        os.closerange(last + 1, file)
        last = file
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    forkserver._forkserver._lock = threading.Lock()  # whoever forked us holds it
    gc.enable()
