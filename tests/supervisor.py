# SPDX-License-Identifier: Apache-2.0
"""Run tools/supervise.py from a test, and see what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# argv[1]: {"ATTEMPT.RANK": what to do, or ".RANK", or "": in every other case}
PROGRAM = """
import glob, json, os, signal, struct, sys, time
plan = json.loads(sys.argv[1])
if "--dry-run" in sys.argv:
    sys.exit(0 if int(os.environ["WORLD_SIZE"]) in plan["fits"] else 2)
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
words = attempt, rank, os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"], os.getpid()
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: another rank writes too
do = plan.get(f"{attempt}.{rank}", plan.get(f".{rank}", plan.get("", 0)))
if rank == "0" and "step" in plan:
    now = time.monotonic()
    with open(os.environ["WEFT_SUPERVISOR"] + "/progress", "wb") as file:
        file.write(struct.pack("=qdqdq", 0, now, plan["step"], now, 0))
if do == "wait":
    time.sleep(60)
here, count = f"{os.environ['WEFT_SUPERVISOR']}/started.{attempt}.", os.environ["LOCAL_WORLD_SIZE"]
open(here + rank, "w").close()
count, until = int(count), time.monotonic() + 20  # a fault ends all ranks: first all have started
while len(glob.glob(here + "*")) < count and time.monotonic() < until:
    time.sleep(0.01)
if isinstance(do, str):
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": do}}, file)
    do = 1
if do < 0:
    os.kill(os.getpid(), -do)
os._exit(do)
"""


class Supervisor:
    """tools/supervise.py at work. plan: for the program of a few lines."""

    def __init__(
        self,
        folder: Path,
        flags: str,
        plan: dict[str, Any] | None = None,
        argv: Any = (),
        **env: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log, self.out = folder / "supervise.jsonl", folder / f"out.{time.monotonic_ns()}"
        if plan is not None:
            (folder / "program.py").write_text(PROGRAM)
            flags, argv = f"{flags} --cold", [str(folder / "program.py"), json.dumps(plan)]
        words = [*flags.split(), "--log-json", str(self.log), *argv]
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "tools/supervise.py", *words],
                cwd=ROOT, stdout=out, stderr=out, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )  # fmt: skip

    def said(self) -> str:
        return self.out.read_text()

    def until(self, text: str, times: int = 1, seconds: float = 120.0) -> str:
        """Wait until it has said a text so often; return all that it has said."""
        deadline = time.monotonic() + seconds
        while self.said().count(text) < times and time.monotonic() < deadline:
            assert self.process.poll() is None or self.said().count(text) >= times, self.said()
            time.sleep(0.02)
        assert self.said().count(text) >= times, self.said()
        return self.said()

    def wait(self, seconds: float = 90.0) -> int:
        """Return its exit code; nothing of it is left."""
        try:
            code = self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGKILL)
        assert not left(self.process.pid)
        return code

    def starts(self) -> list[list[str]]:
        """Return what each start of the short program printed: attempt, rank, world, port, pid."""
        lines = [line.split() for line in self.said().splitlines()]
        return sorted(words for words in lines if len(words) == 5 and words[0].isdigit())

    def rows(self, event: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [row for row in rows if row["event"] == event]


def left(supervisor: int, seconds: float = 40.0) -> list[str]:
    """List what is left of a supervisor after a while: its memory, processes that know of that."""
    deadline = time.monotonic() + seconds
    while True:
        found = [str(p) for p in Path("/dev/shm").glob(f"weft-{os.getuid()}-{supervisor}-*")]
        mark = f"weft-{os.getuid()}-{supervisor}-".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                if mark in words:
                    found.append(process.name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def tensors(folder: Path, step: int) -> list[str]:
    """Return the hashes of a checkpoint's files of tensors."""
    manifest = json.loads((folder / f"step_{step:08d}" / "manifest.json").read_text())
    files = manifest["files"].items()
    return [info["sha256"] for name, info in sorted(files) if name.endswith(".safetensors")]
