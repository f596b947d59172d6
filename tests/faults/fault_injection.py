# SPDX-License-Identifier: Apache-2.0
"""Inject a fault into a rank of a real run: at which call of a function, and what happens there.

A fault is {"point", "rank", "call", "how"}: at that call of the function at `point`, that rank (-1:
each rank) suffers `how`. A point "save: PHASE" is a moment inside a save, or in the removal of old
checkpoints after it, as training/checkpoint names them to its hook. More keys narrow it down:

    "during"  count calls only while the rank says that it is doing this; the fault strikes half a
              second later, so that the others have heard what it was doing
    "axis"    count calls only on axes of these names (of "collective")
    "from"    count calls only from this iteration on
    "save"    count calls only in this process's save of this number
    "times"   how many calls in a row it strikes, from that one on; otherwise one

`how` is one of the signals of SIGNALS, over a second apart; "kill all", every rank of the job;
"raise"; "exit 0"; "stall", where the thread never goes on while the process's others do, and
"hold", where they do not either; "wait" for a file `go` in the job's folder, or another "file";
"slow", by "seconds" before the call (by 0.2 to 1 of them where "vary" is a seed), and "slow
inside", for a wait; "clock", where time.time() is ahead by "seconds" from then on; "nan" and "inf",
written at "backward" into the gradient that is done; "flip", at "update" one bit of an fp32 weight;
an error of a disk, raised there: "ENOSPC", "EIO", "EROFS" and so on; "short", where no file may
grow over 20 kB during that call. What is done to the directory "path": "remove", "fill" its disk
and "empty" it again, "close" it to new names, root's too, and "open" it. "spoil" writes a wrong
number: tests/faults/bad_numbers.py says which.

As it strikes it writes struck.R in the job's folder: when, by time.monotonic(), and what it hit.
"""

import ctypes
import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

import pretrain_llama
from mpu.comm import transport
from mpu.comm.transport import Handle
from mpu.grid import Grid
from mpu.layers import linear
from mpu.optim import adam
from mpu.pipeline import engine
from mpu.zero import bucket, gather, norm, param_and_grad_buffer
from tests.faults import bad_numbers
from training.checkpoint import Checkpoint, retain, stage
from training.data.cache import IndexCache
from training.data.loader import Loader

saving = sys.modules["training.checkpoint.save"]
POINTS = {
    "before the meeting": (pretrain_llama, "meet"),
    "connect": (Grid, "connect"),
    "build": (pretrain_llama, "build"),
    "data": (Loader, "next_global_batch"),
    "index": (IndexCache, "_build"),
    "reading": (Loader, "_make"),
    "loading": (Checkpoint, "read"),
    "pread": (os, "pread"),
    "step": (pretrain_llama, "train_step"),
    "forward": (pretrain_llama.Llama, "forward"),
    "receive": (engine, "receive"),
    "wait": (engine._Run, "_take"),
    "send": (engine, "send"),
    "layer": (linear.RowParallelLinear, "forward"),
    "backward": (pretrain_llama.ParamAndGradBuffer, "register_grad_ready"),
    "gradient sums": (pretrain_llama.ParamAndGradBuffer, "finish_grad_sync"),
    "wait for a collective": (Handle, "wait"),
    "collective": (transport.Axis, "start"),
    "a wait": (transport, "blocked"),
    "update": (pretrain_llama.Optimizer, "step"),
    "action": (engine._Run, "do"),
    "use of a weight": (pretrain_llama.ParamAndGradBuffer, "acquire"),
    "gather of a block": (gather.Gatherer, "unshard"),
    "bucket leaves": (bucket.ParamAndGradBucket, "start_grad_sync"),
    "bucket goes on": (bucket.ParamAndGradBucket, "wait_and_start_next"),
    "gather of the norm": (norm, "all_gather"),
    "gather of the weights": (param_and_grad_buffer, "all_gather"),
    "AdamW": (adam.TorchAdam, "step"),
    "evaluation": (pretrain_llama, "forward_only"),
    "saving": (saving, "write_safetensors"),
    "committing": (saving, "_commit"),
    "staging": (stage.Staging, "copy"),
    "staged": (stage.Background, "start"),
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
}
SIGNALS = {
    "kill": [signal.SIGKILL],
    "stop": [signal.SIGSTOP],
    "term": [signal.SIGTERM],
    "usr1": [signal.SIGUSR1],
    "int": [signal.SIGINT],
    "int twice": [signal.SIGINT, signal.SIGINT],
}
ITERATION = re.compile(r"iteration (\d+)")
PAUSE = 0.5
SHORT = 20_000  # bytes


class Injected:
    """A fault that waits for its moment in this rank. folder: the job's, with every pid.R."""

    def __init__(self, fault: dict[str, Any], folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.left, self.saves = fault["call"], 0
        self.monitor: Any = None
        self.draw = random.Random(fault.get("vary"))
        self.least = 0.2 if "vary" in fault else 1.0

    def due(self) -> bool:
        """Count a call; return whether this is the one."""
        action = self.monitor.action if self.monitor else ""
        last = ITERATION.findall(action)[-1:]
        if "during" in self.fault and action != self.fault["during"]:
            return False
        if "from" in self.fault and not (last and int(last[0]) >= self.fault["from"]):
            return False
        if self.saves != self.fault.get("save", self.saves):
            return False
        self.left -= 1
        return -self.fault.get("times", 1) < self.left <= 0

    def told(self, hit: str = "") -> None:
        """Write down that it strikes now, the first time."""
        path = self.folder / f"struck.{os.environ['RANK']}"
        if self.folder != Path() and not path.exists():
            aside = path.with_name(f"{path.name}.aside")
            aside.write_text(json.dumps({"at": time.monotonic(), "hit": hit}))
            aside.replace(path)

    def strike(self) -> None:
        """Do what was asked for, but for what needs the call's arguments."""
        how, path, seconds = (self.fault.get(key, "") for key in ("how", "path", "seconds"))
        if how == "raise":
            raise RuntimeError("broken on purpose")
        if hasattr(errno, how):
            number = getattr(errno, how)
            raise OSError(number, os.strerror(number), "on purpose")
        if how == "exit 0":
            sys.exit(0)
        while how == "stall":
            time.sleep(60)
        while how == "hold":
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
        while how == "wait" and not (self.folder / self.fault.get("file", "go")).exists():
            time.sleep(0.002)
        if how == "slow":
            time.sleep(seconds * self.draw.uniform(self.least, 1.0))
        elif how == "clock":
            right = time.time
            time.time = lambda: right() + seconds
        if how == "exit":
            sys.exit(0)
        if how == "kill all":
            mine = str(os.getpid())
            others = {p.read_text() for p in self.folder.glob("pid.*")} - {mine}
            for pid in [*others, mine]:
                os.kill(int(pid), signal.SIGKILL)
        elif how in ("close", "open"):
            immutable(Path(path), how == "close")
        elif how == "remove":
            shutil.rmtree(path)
        elif how == "fill":
            fill(Path(path))
        elif how == "empty":
            (Path(path) / FILLER).unlink()
        if "during" in self.fault and how in SIGNALS:
            time.sleep(PAUSE)
        for i, number in enumerate(SIGNALS.get(how, [])):
            time.sleep(1.2 * i)
            os.kill(os.getpid(), number)

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in whose stead of `inner` the fault strikes."""

        def struck(*args: Any, **kwargs: Any) -> Any:
            planning = any(isinstance(x, Tensor) and x.is_meta for x in args)  # no call of the run
            elsewhere = "axis" in self.fault and args[0].name not in self.fault["axis"]
            if planning or elsewhere or not self.due():
                return inner(*args, **kwargs)
            how = self.fault["how"]
            if how == "spoil":
                return bad_numbers.spoil(self.fault, self.told, inner, *args, **kwargs)
            self.told()
            if how in ("nan", "inf"):
                args[0].main_grad(args[1]).view(-1)[0] = float(how)
            elif how == "flip":
                words = args[0].sink.buckets[0].param_shard.view(-1).view(torch.int32)
                words[3] ^= 1 << 12
            elif how == "short":
                return shortened(inner, *args, **kwargs)
            elif how == "slow inside":
                return slow_inside(inner(*args, **kwargs), self.fault["seconds"])
            self.strike()
            return inner(*args, **kwargs)

        return struck

    def hook(self, name: str, inner: Callable[[str], None]) -> Callable[[str], None]:
        """Return a save's hook that strikes in the phase `name`."""

        def struck(phase: str) -> None:
            self.saves += phase == "start"
            inner(phase)
            if phase == name and self.due():
                self.told()
                self.strike()

        return struck


FILLER = "filler"


def fill(directory: Path) -> None:
    """Leave no byte of the disk under `directory`: another program's file takes them all."""
    with open(directory / FILLER, "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC


def immutable(directory: Path, on: bool) -> None:
    """Set or take away the flag with which Linux lets nobody, not even root, make a name there."""
    fd = os.open(directory, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack("l", 0x10 * on))  # FS_IOC_SETFLAGS, FS_IMMUTABLE_FL
    os.close(fd)


@contextmanager
def slow_inside(wait: AbstractContextManager[None], seconds: float) -> Iterator[None]:
    """Lengthen a wait, as a slow link does."""
    with wait:
        time.sleep(seconds)
        yield


def shortened(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it while no file of this process may grow over SHORT bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, hard))
    try:
        return inner(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def inject(faults: dict[str, Any] | list[dict[str, Any]], folder: Path) -> None:
    """Put the faults in their places, those of this rank, unless one struck it before."""
    here = int(os.environ["RANK"])
    if folder != Path() and (folder / f"struck.{here}").exists():
        return  # a launcher started it again
    for fault in [faults] if isinstance(faults, dict) else faults:
        if fault["rank"] in (-1, here):
            _inject(Injected(fault, folder))


def _inject(injected: Injected) -> None:
    enter = pretrain_llama.FailureMonitor.__enter__

    def entered(monitor: Any) -> Any:
        injected.monitor = monitor
        return enter(monitor)

    pretrain_llama.FailureMonitor.__enter__ = entered
    point = injected.fault["point"]
    if "save" in injected.fault or point.startswith("save: "):  # the hook counts saves, too
        defaults, phase = saving.save.__kwdefaults__, point.removeprefix("save: ")
        defaults["hook"] = injected.hook(phase, defaults["hook"])
        inner, *rest = retain.prune.__defaults__
        retain.prune.__defaults__ = (injected.hook(phase, inner), *rest)
    if point in POINTS:
        owner, name = POINTS[point]
        setattr(owner, name, injected.wrap(getattr(owner, name)))
