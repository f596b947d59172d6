# SPDX-License-Identifier: Apache-2.0
"""Run the stages of `make train`: each is a command, printed, and reused while its input is."""

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.path.relpath(sys.executable, ROOT)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line(flags: dict[str, Any], switches: list[str]) -> list[str]:
    """Return {"num-layers": 4} and ["swiglu"] as ["--num-layers", "4", "--swiglu"]."""
    pairs = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return pairs + [f"--{name}" for name in switches]


def show(command: list[str], threads: int | None = None) -> None:
    """Print a command as typed in the checkout; a flag and its values stay on one line."""
    units = [f"OMP_NUM_THREADS={threads}"] if threads else [""]
    for word in command:
        if word.startswith("--"):
            units.append("")
        units[-1] += " " * bool(units[-1]) + shlex.quote(word)
    text = " ".join(unit.replace(" ", "\0") for unit in units)
    lines = textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)
    print("\n  $ " + " \\\n      ".join(lines).replace("\0", " ") + "\n", flush=True)


def run(command: list[str], threads: int | None = CORES, stdout: int | None = None) -> str:
    """Run a command of this checkout; return its stdout if that is piped.

    threads: None lets the command choose. It runs in a session of its own, so that Ctrl-C reaches
    it once, from here, and its ranks have the time to finish their step and save.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with subprocess.Popen(
        command, env=environment, text=True, start_new_session=True, stdout=stdout
    ) as child:
        try:
            said = child.communicate()[0]
        except KeyboardInterrupt:
            number = signal.SIGINT if "pretrain_llama.py" in command else signal.SIGTERM
            while child.poll() is None:  # a second Ctrl-C signals once more: no time to save
                for process in ranks(child.pid) if "--nproc-per-node" in command else [child.pid]:
                    os.kill(process, number)
                with contextlib.suppress(KeyboardInterrupt):
                    child.wait()
            raise
    if child.returncode:
        script = next(Path(word).name for word in command if word.endswith(".py"))
        raise SystemExit(f"make train: {script} failed, as it says above")
    return said


def ranks(launcher: int) -> list[int]:
    """Return the processes that torchrun started: a signal makes them save, and it ends quietly.

    Without /proc, return the launcher itself, which passes a signal on with a traceback.
    """
    file = Path(f"/proc/{launcher}/task/{launcher}/children")
    started = file.read_text().split() if file.exists() else []
    return [int(process) for process in started] or [launcher]


def digest(*things: object) -> str:
    """Return a short hash of what a stage depends on."""
    return hashlib.sha256(json.dumps(things, default=str).encode()).hexdigest()[:16]


def stage(folder: Path, key: str, command: list[str], outputs: list[str]) -> str:
    """Run a stage that writes `outputs` in `folder`, or reuse what it wrote; return its new key."""
    script = Path(command[1]).read_bytes()
    key, stamp = digest(key, command, hashlib.sha256(script).hexdigest()), folder / "stage.json"
    try:
        done = json.loads(stamp.read_text())
    except (OSError, ValueError):
        done = {}
    if done.get("key") == key and all((folder / name).exists() for name in outputs):
        print(f"reused {done['said']}", flush=True)
        return key
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    show(command)
    said = run(command, stdout=subprocess.PIPE).strip()
    print(said, flush=True)
    stamp.write_text(json.dumps({"key": key, "said": said.splitlines()[0]}))
    return key
