# SPDX-License-Identifier: Apache-2.0
"""Say in one sentence which packages this Python lacks, in place of a traceback.

It needs the standard library alone. A script calls `explain_missing_packages` before its imports.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
MISTAKE = 2  # the exit code


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
    return f"{text}: `make setup` makes .venv with them; {here}"


def explain_missing_packages() -> None:
    """Let a missing package end this script with one sentence and exit code 2."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if not isinstance(error, ModuleNotFoundError) or not name or (ROOT / name).exists():
            before(kind, error, trace)
            return
        script = os.path.basename(sys.argv[0])
        print(f"{script}: {sentence(name)}", file=sys.stderr, flush=True)
        os._exit(MISTAKE)

    sys.excepthook = hook
