# SPDX-License-Identifier: Apache-2.0
"""Run pretrain_llama.py on several ranks at a time, if asked with a fault: a script, not a test.

Importing torch takes longer than a tiny run, so this process imports the program once and forks the
ranks of each job. A job is a JSON line on stdin; the answer is a JSON line on stdout, once all of
its ranks have ended: exit codes (negative: the signal) and the seconds at which each ended. Each
rank's stdout and stderr stand in DIR/out.R and DIR/err.R, its process id in DIR/pid.R.

With arguments (`run_ranks.py FAULT FLAG...`) it is one rank, as a launcher starts it; the job's
folder is then FAULT_FOLDER of its environment.

tests/faults/fault_injection.py says what a fault is. A job may also name "held", ranks that cannot
move, so that they are killed once the others have ended, as a launcher does; "limit", seconds after
which all are killed; "patient", where ranks that are all stopped are left as they are; "netns", the
network namespace of each rank; "env"; and "stdout", a path. A job with "python" is no rank: it is
what `python WORDS...` would be, without the imports, and "memory" bounds its address space.
"""

import ctypes
import gc
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import pretrain_llama  # noqa: E402
from mpu.comm import symmetric  # noqa: E402
from mpu.grid import Grid  # noqa: E402
from tests.faults.fault_injection import inject  # noqa: E402
from training.faults import (
    activity,  # noqa: E402
    process,  # noqa: E402
)
from training.faults.hang_watch import HangWatch  # noqa: E402
from training.run.peak_flops import measured_peak  # noqa: E402
from training.run.step import Decision, Step  # noqa: E402
from training.run.watch.intervals import Intervals  # noqa: E402

train = pretrain_llama.train
LIMIT = 120.0  # seconds


def shorten(seconds: float) -> None:
    """Let a wait in a collective end after so few seconds."""
    connect = Grid.connect

    def connected(grid: Grid, device: Any, store: Any, timeout: timedelta) -> Grid:
        return connect(grid, device, store, timedelta(seconds=seconds))

    Grid.connect = connected


def load_and_save(run: Any, loaders: Any, saver: Any, *rest: Any, **named: Any) -> None:
    """Take the place of `train`: save again what was loaded, without a step."""
    saver.save(run.iteration, run.consumed, must=True)


def save_first(run: Any, loaders: Any, saver: Any, *rest: Any, **named: Any) -> None:
    """Take the place of `train`: save again what was loaded, then train."""
    load_and_save(run, loaders, saver)
    train(run, loaders, saver, *rest, **named)


class Allocated(ctypes.Structure):
    """What mallinfo2 of the C library returns: bytes in use are uordblks and hblkhd."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def sampled(every: int, file: Path) -> None:
    """Let this rank write what it holds after every so many steps, a line each."""
    after_step = Intervals.after_step
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Allocated
    gc.freeze()  # a collection looks at what came since

    def sampling(intervals: Intervals, step: Step) -> Decision:
        iteration = step.iteration
        if iteration % every == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            maps = Path("/proc/self/maps").read_text().splitlines()
            spans = [line.split()[0].split("-") for line in maps if "/memfd:" in line]
            shared = sum(int(high, 16) - int(low, 16) for low, high in spans)
            counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
            gc.collect()  # frees also what Python keeps for later: a few thousand tuples
            found = libc.mallinfo2()
            alive = [sys.getallocatedblocks(), found.uordblks + found.hblkhd]
            with open(file, "a") as out:
                out.write(json.dumps([iteration, resident, *counts, shared, *alive]) + "\n")
        return after_step(intervals, step)

    Intervals.after_step = sampling


def enter_network(path: str) -> None:
    """Move this process, which has one thread, into a network namespace of Linux."""
    libc, file = ctypes.CDLL(None, use_errno=True), os.open(path, os.O_RDONLY)
    if libc.setns(file, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"{path}: setns")
    os.close(file)


def be_python(words: list[str], env: dict[str, str]) -> None:
    """Become a process that runs a script, or the code behind -c; does not return."""
    os.environ.clear()
    os.environ.update(env)
    code, sys.argv = 0, words
    sys.path[0] = "" if words[0] == "-c" else str(Path(words[0]).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        said = ended.code is not None and not isinstance(ended.code, int)
        print(ended.code, file=sys.stderr) if said else None
        code = 1 if said else ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def be_rank(job: dict[str, Any], rank: int) -> None:
    """Become one rank of a job; does not return."""
    folder = Path(job["dir"])
    # torch makes its pool anew after a fork, and threads of a loader that came to it at once would
    # find none ("Invalid thread pool")
    torch.set_num_threads(torch.get_num_threads())
    out = job.get("stdout", f"{folder}/out.{{}}").format(rank)
    for number, path in ((1, out), (2, f"{folder}/err.{rank}")):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    if "python" in job:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["cwd"])
        if job.get("memory"):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + job["memory"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        be_python(job["python"], job["env"])
    if "netns" in job:
        enter_network(job["netns"][rank])
        # hosts of their own: their ranks do not see each other's processes
        process.host = symmetric.host = lambda: job["netns"][rank]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.get("world", job["ranks"])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        **job.get("env", {}),
    }
    argv = [*job["argv"], *job.get("more", {}).get(str(rank), [])]
    if job.get("fault"):
        inject(job["fault"], folder)
    patience = dict(job.get("monitor", {}))
    if "silence" in patience:
        argv += ["--peer-timeout", str(patience.pop("silence"))]
    if "floor" in patience:  # the least limit of a phase
        HangWatch.__init__.__kwdefaults__["floor"] = patience.pop("floor")
    pretrain_llama.FailureMonitor.__init__.__kwdefaults__.update(patience)
    if job.get("timeout"):
        shorten(job["timeout"])
    if "descriptors" in job:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (job["descriptors"], hard))
    if "meeting" in job:  # seconds that ranks wait for each other there
        meet = pretrain_llama.meet
        limit = timedelta(seconds=job["meeting"])
        pretrain_llama.meet = lambda _, *where, **more: meet(limit, *where, **more)
    if "first" in job:  # seconds after which a slow start is told
        activity.FIRST, activity.LOOK = job["first"], job["first"] / 4
    if job.get("late") == rank:  # by this rank's clock alone the time is up
        pretrain_llama.time_is_up = lambda settings, started: True
    if job.get("sample"):
        sampled(job["sample"], folder / f"samples.{rank}")
    if job.get("no_step"):
        pretrain_llama.train = load_and_save
    if job.get("save_first"):
        pretrain_llama.train = save_first
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as it is while the program imports torch
    pretrain_llama.as_process(lambda: pretrain_llama.main(argv), None)
    os._exit(0)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of a job and wait for all."""
    pids = {}
    for rank in range(job["ranks"]):
        if rank in job.get("absent", ()):
            Path(job["dir"], f"err.{rank}").touch()
            continue
        pid = os.fork()
        if pid == 0:
            be_rank(job, rank)
        pids[pid] = rank
    codes: list[int | None] = [None] * job["ranks"]
    ended = [0.0] * job["ranks"]
    start, killed = time.monotonic(), False
    stopped = {pid: rank in job.get("held", []) for pid, rank in pids.items()}
    limit = job.get("limit", LIMIT)
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        now = time.monotonic() - start
        if pid and os.WIFSTOPPED(status):
            stopped[pid], ended[pids[pid]] = True, now
        elif pid and os.WIFCONTINUED(status):
            stopped[pid], ended[pids[pid]] = False, 0.0
        elif pid:
            rank = pids.pop(pid)
            codes[rank] = os.waitstatus_to_exitcode(status)
            ended[rank] = ended[rank] or now
        else:
            time.sleep(0.01)
        late = now > limit and not killed
        killed = killed or late
        for other in pids:
            if late or all(stopped[p] and not job.get("patient") for p in pids):
                os.kill(other, signal.SIGKILL)
    return {"codes": codes, "ended": ended, "late": killed, "began": start}


def serve(reads: Connection, writes: Connection) -> None:
    """Be this script with these files, in a process that was forked."""
    for number, end in enumerate((reads, writes)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.argv = [__file__]
    os.environ["OMP_NUM_THREADS"] = "1"
    pretrain_llama.torch.set_num_threads(1)
    main()


def main() -> None:
    """Serve jobs, or be one rank."""
    if len(sys.argv) > 1:
        inject(json.loads(sys.argv[1]), Path(os.environ.get("FAULT_FOLDER", "")))
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        pretrain_llama.as_process(lambda: pretrain_llama.main(sys.argv[2:]), error_file)
        return
    gc.freeze()
    measured_peak.__defaults__ = (0.0,)  # one matmul, where a run takes 0.3 s of them
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
