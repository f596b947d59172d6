# SPDX-License-Identifier: Apache-2.0
"""One node's part of tools/supervise.py: start its ranks, watch them, keep copies of their state.

The copies are checkpoints in a directory of the host's memory (training/run/saver.py writes
them; every N steps, --peer-checkpoint N). A node's ranks write their own files there. Each node
fetches the files of one other node, so that the loss of a node leaves a copy.
"""

import argparse
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.supervisor.channel import Channel, Listener, WireError, call
from tools.supervisor.report import say
from training.faults.admission import Seat
from training.faults.wire import BLOB_LIMIT
from training.untrusted import printable, read_json, read_plain

SCRIPT = Path(__file__).resolve().parent / "ranks.py"
MEMORY = Path("/dev/shm")
NEW = 60.0  # seconds for which a directory may not have its lock yet
POLL = 0.05  # seconds between two looks at the ranks' progress
# seconds without a heartbeat of the process that starts ranks: until it may go on
# (SIGCONT), and until it is killed; IMPORTING: while it imports torch
WAKE, SILENT, IMPORTING = 10.0, 20.0, 300.0
PROGRESS = struct.Struct("=qdqdq")  # as training/run/saver.py writes it
MANIFEST = 1 << 28  # most bytes of a copy's manifest
NEEDS = re.compile(r"needs_(\d{8,})\.json")
FILE = re.compile(r"[\w][\w.-]{0,200}")
Event = dict[str, Any]


def memory_directory() -> tuple[Path, int]:
    """Make this supervisor's directory in the host's memory, for this user alone.

    Where that is full or is missing, the directory for temporary files is used. Return it and a
    descriptor that locks it, also in whoever inherits that. Directories that nobody holds any more
    are removed: their supervisors were killed, with all that they had started. Raises OSError.
    """
    if MEMORY.is_dir():
        try:
            return _directory_in(MEMORY)
        except OSError as error:
            say(
                f"{MEMORY}: {error.strerror}: {tempfile.gettempdir()} is used instead, also for "
                "copies of the state (--peer-checkpoint)"
            )
    return _directory_in(Path(tempfile.gettempdir()))


def _directory_in(base: Path) -> tuple[Path, int]:
    for old in base.glob(f"weft-{os.getuid()}-*"):
        with suppress(OSError):
            fresh = time.time() - old.lstat().st_mtime <= NEW
            if not fresh and _is_ours(old) and (fd := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(fd)
    path = base / f"weft-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    try:
        for name in ("memory", "errors"):
            (path / name).mkdir(mode=0o700)
        # ranks report by it also where the memory is full by then
        fd = os.open(path / "progress", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, PROGRESS.size)
        finally:
            os.close(fd)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    locked = _lock(path)
    assert locked is not None, f"{path} is new, and locked"
    return path, locked


def _is_ours(path: Path) -> bool:
    """Return whether a supervisor made a directory: by its name, and by what is in it."""
    named = re.fullmatch(rf"weft-{os.getuid()}-\d+-[0-9a-f]{{8}}", path.name)
    return bool(named) and {"memory", "errors", "progress"} >= set(os.listdir(path))


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a directory of this user's, or None."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid == os.getuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _received(sock: socket.socket) -> bytes:
    """Return what came, b"" where the other side is gone."""
    try:
        return sock.recv(65536)
    except OSError:
        return b""


class Node:
    """This machine's ranks and memory. nodes: numbers of those that may call, each of which serve()
    hears. event(message): called, from any thread, with what happens.

    {"ended": [rank, code, cause], "attempt"}; {"gone"}: the process that starts ranks was killed;
    {"progress": [first iteration, when, iteration, when, source]}; {"kept": step, "files": names of
    all nodes' files, "needs": {rank: names}, "have": names}; {"fetched": step, "have": names or
    None}; {"dry run": [world, code]}. Times are seconds of this host's monotonic clock.
    """

    def __init__(
        self, argv: list[str], options: argparse.Namespace, secret: bytes, *, host: str, port: int,
        event: Callable[[Event], None], nodes: range = range(0),
        serve: Callable[[Channel, int, Seat], None] = lambda channel, number, seat: None,
    ) -> None:  # fmt: skip
        self.argv, self.warm, self.event = argv, options.warm, event
        self.secret, self.silence, self.attempt = secret, options.peer_timeout, 0
        self.directory, self._lock_fd = memory_directory()
        self.memory = self.directory / "memory"
        self._copied, self._closed, self.port = dict[str, int](), False, 0
        self._progress, self._reported = threading.Lock(), tuple[Any, ...]()

        def met(channel: Channel, number: int | None, seat: Seat | None) -> None:
            if number is None or seat is None:
                self._give(channel, channel.receive()[0])
            else:
                serve(channel, number, seat)

        def wrong(address: str) -> None:
            say(
                f"{address} connects with a different secret: all nodes of a run need the same "
                "WEFT_SECRET"
            )

        if options.nnodes > 1:
            try:
                self._listener = Listener(
                    host, port, secret, self.silence, met, nodes=nodes, wrong=wrong
                )
            except OSError:  # the port is taken
                self._remove()
                raise
            self.port = self._listener.port
        self._start()
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def _start(self) -> None:
        """Start the process that starts the ranks."""
        ours, theirs = socket.socketpair()
        self._sock, self._events, self._ready = ours, 0, False
        with theirs:
            words = [str(theirs.fileno()), str(self.directory), "warm" if self.warm else "cold"]
            inherited = [theirs.fileno(), self._lock_fd]
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._listen, args=(ours,), name="ranks", daemon=True).start()

    def _listen(self, sock: socket.socket) -> None:
        buffer = b""
        while data := _received(sock):
            self._events += 1
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "beat" in message:
                    continue
                self._ready = self._ready or "ready" in message
                if "ended" in message:
                    rank, code = message["ended"]
                    self._report_progress()  # of steps since the last look
                    message = {"ended": [rank, code, self._cause(rank)], "attempt": self.attempt}
                self.event(message)
        if not self._closed:  # killed, and so are its ranks
            self._process.wait()
            self._start()
            self.event({"gone": True})

    def _cause(self, rank: int) -> str:
        """Return what a rank wrote into its TORCHELASTIC_ERROR_FILE, in one line, or ""."""
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            text = str(read_json(self._error_file(rank))["message"]["message"])
            return printable(text.strip().splitlines()[0])[:500]
        return ""

    def _error_file(self, rank: int) -> Path:
        return self.directory / "errors" / f"{self.attempt}.{rank}.json"

    def _send(self, **message: Any) -> None:
        with suppress(OSError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def do(self, message: Event) -> None:
        """Do what the leader says; see the methods' names."""
        if "start" in message:
            self._begin(message["start"])
        if "signal" in message:
            self._send(signal=message["signal"])
        if "try" in message:
            self._send(**{"dry run": message["try"], "argv": self.argv})
        if "fetch" in message:
            threading.Thread(target=self._fetch, args=(message["fetch"],), daemon=True).start()
        if "forget" in message:
            low, high = message["forget"]
            for step, path in self._steps():
                if not low <= step <= high:
                    (self.memory / f"needs_{step:08d}.json").unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)

    def _steps(self) -> list[tuple[int, Path]]:
        found = self.memory.glob("step_*")
        return [(int(p.name[5:]), p) for p in found if p.name[5:].isdecimal()]

    def _begin(self, plan: Event) -> None:
        """Start this node's ranks of an attempt."""
        self.attempt, slots, first = plan["attempt"], plan["slots"], plan["first"]
        with suppress(OSError), open(self.directory / "progress", "r+b") as file:
            file.write(bytes(PROGRESS.size))
        base = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        base.pop("WEFT_SECRET_FILE", None)  # read already
        base |= {
            "WORLD_SIZE": str(plan["world"]), "LOCAL_WORLD_SIZE": str(len(slots)),
            "MASTER_ADDR": plan["host"], "MASTER_PORT": str(plan["port"]),
            "TORCHELASTIC_RESTART_COUNT": str(plan["attempt"]),
            "WEFT_SUPERVISOR": str(self.directory), "WEFT_SECRET": os.fsdecode(self.secret),
        }  # fmt: skip
        if slots != list(range(len(slots))):  # a device is left out
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = [seen[s] if s < len(seen) and seen[s] else str(s) for s in slots]
            base["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        ranks = []
        for place in range(len(slots)):
            rank = first + place
            more = {"RANK": str(rank), "LOCAL_RANK": str(place)}
            more["TORCHELASTIC_ERROR_FILE"] = str(self._error_file(rank))
            ranks.append(base | more)
        self._send(start=ranks, argv=self.argv)

    def _watch(self) -> None:
        """Report rank 0's progress and the complete copies; end a starter that is stuck."""
        events, quiet, looked, woken = 0, 0.0, time.monotonic(), False
        while not self._closed:
            now = time.monotonic()
            if events != self._events:
                events, quiet, woken = self._events, 0.0, False
            else:  # seconds in which this process stood still, too, do not count
                quiet += min(now - looked, 1.0)
            looked = now
            if self._ready and quiet > WAKE and not woken:
                woken = True
                self._process.send_signal(signal.SIGCONT)
            if quiet > (SILENT if self._ready else IMPORTING):
                say(
                    f"the process that starts ranks (pid {self._process.pid}) has given no sign of "
                    f"life for {quiet:.0f} s: it and its ranks are killed"
                )
                quiet = 0.0
                self._process.kill()
            self._report_progress()
            for entry in os.scandir(self.memory):
                match = NEEDS.fullmatch(entry.name)
                inode = entry.inode()
                if match and self._copied.get(entry.name) != inode:
                    self._copied[entry.name] = inode
                    with suppress(OSError, ValueError, KeyError):  # it is no copy, then
                        self._report(int(match[1]), read_json(entry.path))
            time.sleep(POLL)

    def _report_progress(self) -> None:
        """Report rank 0's progress, where there is more than was reported."""
        with self._progress, suppress(OSError, ValueError, struct.error):
            record = PROGRESS.unpack(read_plain(self.directory / "progress", PROGRESS.size))
            if record != self._reported and any(record):  # zeros: nothing is there yet
                self.event({"progress": list(record)})
                self._reported = record

    def _report(self, step: int, needs: Any) -> None:
        """Report a copy. Raises OSError, ValueError, KeyError for what no run writes."""
        path = self.memory / f"step_{step:08d}"
        manifest = read_json(path / "manifest.json", MANIFEST)
        lists = list(needs.values()) if isinstance(needs, dict) else [None]
        sound = all(isinstance(n, list) and all(isinstance(f, str) for f in n) for n in lists)
        if not sound or not isinstance(manifest, dict) or not isinstance(manifest["files"], dict):
            raise ValueError(f"{path} is not a copy of the state")
        files = [*manifest["files"], "manifest.json"]
        self.event({"kept": step, "files": files, "needs": needs, "have": self._have(step)})

    def _have(self, step: int) -> list[str]:
        path = self.memory / f"step_{step:08d}"
        return sorted(p.name for p in path.iterdir() if not p.name.endswith(".part"))

    def _give(self, channel: Channel, message: Event) -> None:
        """Send the files that another node asks for."""
        directory = self.memory / f"step_{int(message['get']):08d}"
        for name in message["files"]:
            if not FILE.fullmatch(name):
                raise WireError(f"{channel.host} asked for a file with an odd name")
            with suppress(FileNotFoundError), open(directory / name, "rb") as file:
                while blob := file.read(BLOB_LIMIT):
                    channel.send({"name": name}, blob)
                channel.send({"name": name, "end": True})
        channel.send({"done": True})
        channel.close()

    def _fetch(self, order: Event) -> None:
        """Get files of a step from other nodes: {"step", "from": [[host, port, names], ...]}."""
        step, have = order["step"], None
        directory = self.memory / f"step_{step:08d}"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for host, port, names in order["from"]:
                channel = call(host, port, self.secret, self.silence)
                try:
                    channel.send({"get": step, "files": names})
                    self._take(channel, directory, set(names))
                finally:
                    channel.close()
            have = self._have(step)
        except (WireError, OSError) as error:
            print(f"supervise: step {step} was not copied: {error}", file=sys.stderr, flush=True)
        self.event({"fetched": step, "have": have})

    def _take(self, channel: Channel, directory: Path, names: set[str]) -> None:
        while "done" not in (got := channel.receive())[0]:
            name = got[0]["name"]
            if name not in names or not FILE.fullmatch(name):
                raise WireError(f"{channel.host} sent a file that nobody asked for")
            part = directory / f"{name}.part"
            if got[0].get("end"):
                os.replace(part, directory / name)
                continue
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(part, flags, 0o600), "wb") as file:
                file.write(got[1])

    def close(self) -> None:
        """End what is left of the ranks, and remove the memory."""
        self._closed = True
        if self.port:
            self._listener.close()
        self._send(signal=9)
        self._sock.shutdown(socket.SHUT_WR)  # it waits for the ranks, then ends
        self._process.wait()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock_fd)
