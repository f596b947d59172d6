# SPDX-License-Identifier: Apache-2.0
"""Play a storm of faults on real runs and print what became of each kind: `make chaos`.

    python tests/chaos/storm.py --minutes 20 --seed 1          as many as 20 minutes take
    python tests/chaos/storm.py --cases 300 --out runs/chaos   so many; table.md and storm.json

Exits 1 if a promise was broken; of the names 98% must be right. It needs Linux and root, for small
disks and network namespaces.
"""

import argparse
import ctypes
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos.fault import Fault, Kind, draw  # noqa: E402
from tests.chaos.judge import Verdict, judge, kept, table  # noqa: E402
from tests.chaos.kinds import BY_NAME, KINDS  # noqa: E402
from tests.chaos.play import Oracle, play  # noqa: E402
from tests.chaos.scene import free_port  # noqa: E402
from tests.launcher import Launcher, writers_into  # noqa: E402

SHARED = Path("/dev/shm")
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def become_root() -> None:
    """Become the same program as root of a user namespace, where one may mount."""
    os.environ["WEFT_CHAOS"] = "inside"
    words = ["unshare", "--map-root-user", "--mount", sys.executable, *sys.argv]
    os.execvp(words[0], words)


def own_mounts() -> None:
    """Give this thread, and what it starts, mounts of its own and an empty /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare: the storm needs mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(SHARED)], check=True)


def storm(
    faults: Sequence[Fault],
    folder: Path,
    jobs: int,
    until: float | None,
    note: Callable[[Verdict], None],
) -> list[Verdict]:
    """Play faults, `jobs` at a time. until: begin none after this time.monotonic()."""
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    verdicts: list[Verdict] = []
    errors: list[BaseException] = []
    oracle = Oracle(folder)

    def one(launcher: Launcher, fault: Fault) -> Verdict:
        kind = BY_NAME[fault.kind]
        try:
            return judge(play(launcher, folder, fault, kind, oracle, SHARED))
        except Exception:  # of ours: the storm goes on, and the fault counts as broken
            launcher.process.kill()
            launcher.process.wait()
            for pid in writers_into(folder / f"{fault.number:04d}", patience=0.0):
                os.kill(pid, signal.SIGKILL)
            why = traceback.format_exc()
            return Verdict(fault.number, fault.kind, fault.layout, False, broken=[why])

    def work(number: int) -> None:
        try:
            own_mounts()
            play_waiting(number)
        except BaseException as error:
            errors.append(error)

    def play_waiting(number: int) -> None:
        count = 0
        while until is None or time.monotonic() < until:
            launcher = Launcher(folder / f"launcher {number}.{(count := count + 1)}", free_port)
            while launcher.process.poll() is None and (until is None or time.monotonic() < until):
                try:
                    fault = waiting.get_nowait()
                except queue.Empty:
                    launcher.close()
                    return
                verdict = one(launcher, fault)
                verdicts.append(verdict)
                note(verdict)
                if not verdict.broken:
                    shutil.rmtree(folder / f"{fault.number:04d}")
            launcher.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return verdicts


def summary(verdicts: Sequence[Verdict], honest: set[str], wall: float) -> str:
    """Write the totals."""
    held = [v for v in verdicts if v.kind not in honest]
    found = [v.detected for v in held if v.detected is not None]
    named = [v.named for v in held if v.named is not None]
    ends = [v.equal for v in verdicts if v.equal is not None]
    kinds = len({v.kind for v in verdicts})
    back = [v.recovery for v in verdicts if v.recovery is not None]
    mttr = sum(back) / max(1, len(back))
    lines = [
        f"{len(verdicts)} faults of {kinds} kinds in {wall / 60:.0f} minutes",
        f"found {sum(found)} of {len(found)}, named right {sum(named)} of {len(named)}",
        f"{len(ends) - sum(ends)} of {len(ends)} ends differ from those of undisturbed runs",
        f"{sum(v.hang for v in verdicts)} runs past their time, "
        f"{sum(v.left for v in verdicts)} processes or names in /dev/shm left",
        f"mean time to the first new step {mttr:.1f} s, over {len(back)} restarts: at one fault in "
        f"five minutes {100 * (1 - mttr / 300):.1f}% of the time is left, less the steps lost",
    ]
    return "\n".join(f"- {line}." for line in lines)


def chosen(words: Sequence[str]) -> list[Kind]:
    """Return the kinds in whose name one of the words stands; all without words."""
    return [kind for kind in KINDS if not words or any(word in kind.name for word in words)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, help="so many faults (default: what the time allows)")
    parser.add_argument("--minutes", type=float, help="begin no fault after this (default: 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--kinds", nargs="*", default=(), help="only kinds with such a word")
    parser.add_argument("--only", nargs="*", type=int, default=(), help="only these numbers")
    parser.add_argument("--out", type=Path, help="where to write table.md, storm.json")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's ranks would ignore it, as they should
    if args.minutes is None and args.cases is None:
        args.minutes = 20.0
    kinds = chosen(args.kinds)
    if not kinds:
        parser.error(f"--kinds {' '.join(args.kinds)}: no kind has such a name")
    honest = {kind.name for kind in KINDS if kind.promise.honest}
    faults = draw(args.seed, args.cases or 5000, kinds)
    faults = [fault for fault in faults if not args.only or fault.number in args.only]
    began = time.monotonic()
    until = began + 60 * args.minutes if args.minutes else None
    folder = Path(tempfile.mkdtemp(prefix="weft-chaos-"))
    done = 0

    def note(v: Verdict) -> None:
        nonlocal done
        done += 1
        what = "; ".join(why.strip().splitlines()[-1] for why in v.broken) or "as promised"
        said = "" if v.detection is None else f", said after {v.detection:.1f} s"
        print(f"{done:4d}  #{v.number} {v.kind}, {v.layout}{said}: {what}", flush=True)

    verdicts = storm(faults, folder, args.jobs, until, note)
    text = table(verdicts, honest)
    total = summary(verdicts, honest, time.monotonic() - began)
    print(f"\n{text}\n\n{total}")
    broken = [v for v in verdicts if v.broken]
    for v in broken:
        fault = next(fault for fault in faults if fault.number == v.number)
        print(f"\n#{v.number} {v.kind}, {v.layout}: {'; '.join(v.broken)}")
        print(f"    {folder}/{v.number:04d}  {fault}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(f"{text}\n\n{total}\n")
        rows = json.dumps([v.json() for v in verdicts], indent=1)
        (args.out / "storm.json").write_text(rows + "\n")
    if not broken:
        shutil.rmtree(folder)
    return int(not kept(verdicts))


if __name__ == "__main__":
    if os.geteuid() and "WEFT_CHAOS" not in os.environ:
        become_root()
    sys.exit(main())
