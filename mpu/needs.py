# SPDX-License-Identifier: Apache-2.0
"""Say in one sentence which packages this Python lacks, in place of a traceback, and whether its
torch is one that Weft runs with. Ctrl-C is one line, and a reader that leaves is none.

It needs the standard library alone. A script calls `explain_missing_packages` before its imports.
"""

import atexit
import os
import re
import select
import signal
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import FrameType, TracebackType

ROOT = Path(__file__).resolve().parent.parent
MISTAKE = 2  # the exit code
OLDEST, NEWEST = "2.11", "2.13"  # versions of torch: the least, and what `make test` runs with


def release(torch: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch; (0, 0) where it does not begin so."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def too_old(torch: str) -> str:
    """Return why a version of torch cannot run Weft, or ""."""
    if release(torch) >= release(OLDEST):
        return ""
    return f"torch {torch} is older than {OLDEST}, the oldest that Weft supports"


def untested(torch: str) -> str:
    """Return a line that warns of a version of torch which is newer than all tested ones, or ""."""
    if release(torch) <= release(NEWEST):
        return ""
    return f"torch {torch} is newer than the versions tested, {OLDEST} to {NEWEST}"


def lacking() -> list[str]:
    """Return the packages of pyproject.toml that are not installed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [text.partition(">")[0].partition("[")[0] for text in project["dependencies"]]
    found = []
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            found.append(name)
    return found


def sentence(module: str) -> str:
    """Return what to do where a module is not installed in this Python."""
    others = [name for name in lacking() if name != module]
    more = f" (and {', '.join(others)})" if others else ""
    text = f"{sys.executable} has no package {module}{more}"
    python = ROOT / ".venv/bin/python"
    if python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        return f"{text}: activate the environment, `source {ROOT}/.venv/bin/activate`"
    here = "a container needs the packages of pyproject.toml (examples/docker/Dockerfile.ngc)"
    return f"{text}: `make setup` installs them in .venv; {here}"


def explain_missing_packages() -> None:
    """Let a missing package, or a torch that is too old, end this script with one sentence and
    exit code 2.

    Ctrl-C ends it with a line, and by SIGINT, as a shell expects (130). It ends without a word
    where the reader of its output has left, such as `head`.
    """
    before = sys.excepthook
    atexit.register(_reader_left)  # what is still buffered is written after this
    try:
        why = too_old(version("torch"))
    except PackageNotFoundError:
        why = ""  # what is missing is said when it is imported
    if why:
        sys.exit(_ended(f"{why}: {sys.executable}; `make setup` installs a newer one in .venv"))

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _say_stopped()
            return
        if isinstance(error, BrokenPipeError) and _reader_left():
            return
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if not isinstance(error, ModuleNotFoundError) or not name or (ROOT / name).exists():
            before(kind, error, trace)
            return
        os._exit(_ended(sentence(name)))

    sys.excepthook = hook


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C by a line and the end by this signal, past any `except` of the code it meets.
    """
    _say_stopped()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say_stopped() -> None:
    print(f"{_program()}: stopped by Ctrl-C", file=sys.stderr, flush=True)


def _reader_left() -> bool:
    """Return whether standard output has lost its reader; what is written to it is lost then."""
    look = select.poll()
    try:
        look.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return False
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _ended(why: str) -> int:
    """Print why this script ends; return its exit code."""
    print(f"{_program()}: {why}", file=sys.stderr, flush=True)
    return MISTAKE
