# SPDX-License-Identifier: Apache-2.0
"""Start a node's ranks for tools/supervise.py, which runs this; nobody else does.

    python tools/supervisor/ranks.py FD DIRECTORY warm|cold

It imports the program once and forks each rank, so that a restart need not import torch again
(warm), or starts each as a new Python (cold). Importing does not initialise CUDA, so a rank may.

One JSON object a line comes over the socket FD: {"start": [environments], "argv": [SCRIPT,
FLAG...]}, {"signal": number}, {"dry run": world, "argv": ...}. Lines go back: {"ready": seconds},
{"ended": [rank, code]} (a negative code is a signal's), {"dry run": [world, code]}, and every
second {"beat": true}, a sign of life.

Its death kills the ranks. The supervisor's death, which closes the socket, ends them in order: they
are asked to stop, which saves, and are killed if they have not ended after GRACE seconds. Then the
supervisor's DIRECTORY is removed.
"""

import ctypes
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
GRACE = 30.0
PR_SET_PDEATHSIG = 1


class Ranks:
    """The processes started so far that have not ended. warm: fork them; else start Pythons."""

    def __init__(self, sock: socket.socket, warm: bool) -> None:
        self.sock, self.warm = sock, warm
        self.running: dict[int, tuple[str, int]] = {}  # process id: what it is, rank or world
        self.libc = ctypes.CDLL(None, use_errno=True)

    def tell(self, **message: Any) -> None:
        """Send a line to the supervisor, unless it is gone."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def fork(self, kind: str, number: int, environment: dict[str, str], argv: list[str]) -> None:
        """Start one process: a rank, or a dry run that prints nothing."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.running[pid] = kind, number
            return
        try:
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for each in (*PASSED_ON, signal.SIGCHLD):
                signal.signal(each, signal.SIG_DFL)
            self.sock.close()
            if kind != "rank":
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
            os.environ.clear()
            os.environ.update(environment)
            if not self.warm:
                os.execv(sys.executable, [sys.executable, *argv])
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Report the processes that have ended."""
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            kind, number = self.running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self.tell(**{"ended" if kind == "rank" else kind: [number, code]})

    def signal(self, number: int) -> None:
        """Send a signal to all."""
        for pid in self.running:
            os.kill(pid, number)  # not reaped yet, so it is nobody else's number

    def do(self, message: dict[str, Any]) -> None:
        """Do what a line of the supervisor says."""
        for environment in message.get("start", ()):
            self.fork("rank", int(environment["RANK"]), environment, message["argv"])
        if world := message.get("dry run"):
            environment = {**os.environ, "WORLD_SIZE": str(world)}
            self.fork("dry run", world, environment, [*message["argv"], "--dry-run"])
        if number := message.get("signal"):
            self.signal(number)

    def end(self) -> None:
        """End all, in order: the supervisor is gone."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while self.running and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.05)
        self.signal(signal.SIGKILL)


def main() -> None:
    """Serve until the supervisor is gone."""
    sock, directory, warm = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3]
    began = time.monotonic()
    for number in PASSED_ON:  # they come to the ranks by way of the supervisor
        signal.signal(number, signal.SIG_IGN)
    if warm == "warm":
        sys.path.insert(0, str(ROOT))
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whoever asks for CUDA does not open it
        from training.activity import Activity

        with Activity().doing("supervise: importing torch and the program"):
            import torch

            import pretrain_llama  # noqa: F401
            from mpu.torch_private import preload_compiler

            preload_compiler()  # which torch.optim imports when the first optimizer is made

        gc.collect()
        gc.freeze()  # so that collections in a rank do not copy these pages
        if torch.cuda.is_initialized():  # a fork could not use it
            warm = "cold"
    ranks, buffer = Ranks(sock, warm == "warm"), b""
    ranks.tell(ready=time.monotonic() - began)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    beat = time.monotonic()
    while True:
        if time.monotonic() - beat > 1.0:
            beat = time.monotonic()
            ranks.tell(beat=True)
        ready = select.select([sock, woken], [], [], 1.0)[0]
        if woken in ready:
            woken.recv(4096)
        ranks.reap()
        if sock in ready:
            data = sock.recv(65536)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                ranks.do(json.loads(line))
    ranks.end()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
