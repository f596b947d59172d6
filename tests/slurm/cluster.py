# SPDX-License-Identifier: Apache-2.0
"""Run a separate SLURM of two nodes on this machine, for tests/slurm/check.py.

Its configuration, keys and state are in one scratch directory; a SLURM or munge that the system
runs is neither used nor touched.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMANDS = "munged slurmctld slurmd sbatch srun scontrol scancel squeue".split()
NODES, SCRIPT = ("n1", "n2"), b"pretrain_llama.py"
CONFIGURATION = """\
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={scratch}/munge/socket
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={scratch}/state
SlurmdSpoolDir={scratch}/spool.%n
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmdPidFile={scratch}/slurmd.%n.pid
SlurmctldLogFile={scratch}/slurmctld.log
SlurmdLogFile={scratch}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
KillWait=30
SlurmdTimeout=15
MinJobAge=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
"""


class CheckError(Exception):
    """A check failed; the text says which."""


def obstacle() -> str:
    """Return in one sentence why no SLURM can be started here, or ""."""
    if sys.platform != "linux":
        return "SLURM's daemons run on Linux, and this is not one"
    if os.geteuid() != 0:
        return "SLURM's daemons are started as root, and this is another user"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"there is no {missing[0]} here: apt-get install slurm-wlm munge"
    return ""


def wait_for(what: str, seconds: float, ask: Callable[[], Any]) -> Any:
    """Call `ask` until its answer is true; return it. Raises CheckError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise CheckError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return answer


def command_line(process: int) -> bytes:
    """Return a process's command line, each word followed by a zero byte; b"" if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


class Cluster:
    """A context: starts the daemons on entry, kills them and all that they started on exit."""

    def __init__(self, keep: bool = False) -> None:
        self.keep, self.daemons = keep, dict[str, subprocess.Popen[bytes]]()
        self.scratch = Path(tempfile.mkdtemp(prefix="weft-slurm-"))
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(self.scratch / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.scratch.chmod(0o755)  # munged wants its socket within reach of everybody
        munge = self.scratch / "munge"
        munge.mkdir()
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        with socket.socket() as a, socket.socket() as b, socket.socket() as c:
            for each in (a, b, c):
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in (a, b, c)]
        host = socket.gethostname().split(".")[0]
        where = dict(zip(("ctld", *NODES), ports, strict=True))
        text = CONFIGURATION.format(host=host, scratch=self.scratch, **where)
        (self.scratch / "slurm.conf").write_text(text)
        (self.scratch / "state").mkdir(0o700)
        files = [
            f"--{kind}-file={munge}/{kind.split('-')[0]}" for kind in ("key", "pid", "log", "seed")
        ]
        self._daemon("munged", "munged", "--foreground", f"--socket={munge}/socket", *files)
        wait_for("munged opens its socket", 10, (munge / "socket").exists)
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(
            "the nodes come up", 30, lambda: self.ask("sinfo", "-h", "-o", "%D %T") == "2 idle"
        )

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.scratch / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, for the first time or after kill_node."""
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill -9 a node's slurmd and all that it started, as a power cut would."""
        for process in self.processes(node):
            os.kill(process, signal.SIGKILL)
        self.daemons[node].wait()

    def ask(self, *command: str, **more: str) -> str:
        """Run one of SLURM's commands; return its output. Raises CheckError if it fails."""
        done = subprocess.run(
            command,
            env=self.environment | more,
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CheckError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job: JobState, ExitCode, Restarts, ..."""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def processes(self, node: str = "") -> list[int]:
        """Return the process ids of this cluster or of one node: daemons, jobs and their ranks.

        Orphans are included. A task has its node's name in its environment; the process that starts
        it has the node's log open.
        """
        ours = f"SLURM_CONF={self.scratch}/slurm.conf".encode()
        named, log = f"SLURMD_NODENAME={node}".encode(), f"{self.scratch}/slurmd.{node}.log"
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if ours not in environment:
                    continue
                files = [os.readlink(file) for file in (folder / "fd").iterdir()]
            except OSError:  # it ended meanwhile
                continue
            if not node or named in environment or log in files:
                found.append(int(folder.name))
        return found

    def ranks(self) -> list[int]:
        """Return the ids of the processes that train."""
        words = {process: command_line(process).split(b"\0") for process in self.processes()}
        python = re.compile(rb"(.*/)?python3?")  # .venv/bin/python, or the environment's python3
        return [p for p, w in words.items() if python.fullmatch(w[0]) and SCRIPT in w[1:2]]

    def no_jobs(self) -> bool:
        """Return whether nothing runs but the daemons."""
        daemons = {daemon.pid for daemon in self.daemons.values()}
        left = [command_line(p) for p in self.processes() if p not in daemons]
        return all(b"slurmscriptd" in line for line in left)  # slurmctld's own helper

    def __exit__(self, *error: object) -> None:
        ours = [*self.processes(), *(daemon.pid for daemon in self.daemons.values())]
        for process in set(ours):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.wait()
        if not self.keep:
            shutil.rmtree(self.scratch)
