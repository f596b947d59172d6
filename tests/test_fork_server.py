# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from pytest's are as new ones: nothing there writes into its files."""

from tests.launcher import Launcher

CODE = """
import logging
known = logging.root.manager.loggerDict.values()
loggers = [logging.root, *(x for x in known if isinstance(x, logging.Logger))]
handlers = [h for x in loggers for h in x.handlers if isinstance(h, logging.StreamHandler)]
print({h.stream.fileno() for h in handlers if h.stream} - {1, 2})
logging.getLogger("torch").warning("from: torch: itself: 1")
logging.getLogger("weft").warning("from: the: root: 2")
"""


def test_what_a_library_logs_goes_to_stderr(launcher: Launcher) -> None:
    """Not to the number of a file of pytest's, which the resource tracker's pipe may have by now:
    it would print "too many values to unpack" for each line.
    """
    done = launcher.python("-c", CODE)
    assert done.stdout == "set()\n", done.stderr
    assert "from: torch: itself: 1\n" in done.stderr and "from: the: root: 2\n" in done.stderr
