# SPDX-License-Identifier: Apache-2.0
"""Print one sentence instead of a traceback if packages are missing or torch is too old. Ctrl-C
prints one line, and a closed output pipe prints none.

It only needs the standard library. A script calls `explain_missing_packages` before its imports.
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
OLDEST, NEWEST = "2.11", "2.13"  # versions of torch: the oldest, and the one of `make test`


def release(torch: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch, or (0, 0) if it has another format."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def too_old(torch: str) -> str:
    """Return why a version of torch cannot run Weft, or ""."""
    if release(torch) >= release(OLDEST):
        return ""
    return f"torch {torch} is older than {OLDEST}, the oldest that Weft supports"


def untested(torch: str) -> str:
    """Return a warning if a version of torch is newer than all tested ones, or ""."""
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
    """Return a sentence with advice for a module that is not installed in this Python."""
    others = [name for name in lacking() if name != module]
    more = f" (and {', '.join(others)})" if others else ""
    text = f"{sys.executable} has no package {module}{more}"
    python = ROOT / ".venv/bin/python"
    if python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        return f"{text}: activate the environment, `source {ROOT}/.venv/bin/activate`"
    here = "a container needs the packages of pyproject.toml (examples/docker/Dockerfile.ngc)"
    return f"{text}: `make setup` installs them in .venv; {here}"


def explain_missing_packages() -> None:
    """Make a missing package, or a torch that is too old, end this script with one sentence and
    exit code 2.

    Ctrl-C ends it with a line, and by SIGINT, as a shell expects (130). It ends silently if the
    reader of its output, such as `head`, has closed the pipe.
    """
    before = sys.excepthook
    atexit.register(_reader_left)  # runs before buffered output is flushed
    try:
        why = too_old(version("torch"))
    except PackageNotFoundError:
        why = ""  # missing packages are reported when they are imported
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
    """Handle Ctrl-C: print a line and end by this signal, bypassing `except` in running code."""
    _say_stopped()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say_stopped() -> None:
    print(f"{_program()}: stopped by Ctrl-C", file=sys.stderr, flush=True)


def _reader_left() -> bool:
    """Return whether the reader of standard output has left; if so, discard further output."""
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
    """Print the reason why this script ends; return its exit code."""
    print(f"{_program()}: {why}", file=sys.stderr, flush=True)
    return MISTAKE
