# SPDX-License-Identifier: Apache-2.0
"""Under SLURM: the rank that a process takes from srun, and when a job script requeues its job.

SLURM's commands are stand-ins here; the scripts and the ranks are real. `make slurm-check`, which
the last test runs, has a real SLURM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpu.launch import Launch, tasks_of_node
from tests.slurm import near_data

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
# as Debian's SLURM 22.05 sets them: in a job script, and in a task of a step
SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": "4(x3)",
}  # fmt: skip
TASK = SCRIPT | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
}  # fmt: skip
INTERACTIVE = TASK | {  # the shell that salloc opens on a node is a step of one task
    "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that makes these the launcher's variables."""

    def become(variables: dict[str, str]) -> None:
        for name in os.environ:
            if name.startswith(("SLURM", "MASTER_")) or name in TORCHRUN:
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return become


@pytest.mark.parametrize(
    "variables, launch",
    [
        ({}, Launch()),
        (TORCHRUN, Launch(5, 8, 1, 4)),
        (TASK, Launch(9, 10, 1, 2, "srun")),
        (TASK | TORCHRUN, Launch(5, 8, 1, 4)),  # srun torchrun ...
        (SCRIPT, Launch()),  # a plain `python` among its lines
        (SCRIPT | {"WORLD_SIZE": "128"}, Launch(0, 128, 0, 128)),  # a dry run there
        (TASK | {"WORLD_SIZE": "128"}, Launch(0, 128, 0, 128)),
        (INTERACTIVE, Launch()),
    ],
)
def test_who_a_process_is(environment, variables, launch):
    environment(variables)
    assert Launch.from_env() == launch


def test_how_many_tasks_a_node_has():
    assert [tasks_of_node("8(x2),4,16(x10)", node) for node in range(13)] == [8, 8, 4] + [16] * 10


@pytest.mark.parametrize(
    "variables, says",
    [
        (TASK | {"SLURM_PROCID": "-1"}, "SLURM_PROCID in the environment is '-1': it must"),
        (TASK | {"SLURM_STEP_NUM_TASKS": "ten"}, "SLURM_STEP_NUM_TASKS in the environment is"),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "'4(x2)': it does not say how many"),
        (TASK | {"SLURM_PROCID": "10"}, "rank 10 of 10, and on this node 1 of 2: a rank must"),
        (TASK | {"SLURM_LOCALID": "2"}, "rank 9 of 10, and on this node 2 of 2: a rank must"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE in the environment is ''"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
    ],
)  # fmt: skip
def test_nonsense_of_a_launcher_is_one_sentence(environment, variables, says):
    environment(variables)
    with pytest.raises(ValueError) as refused:
        Launch.from_env()
    assert says in str(refused.value) and "\n" not in str(refused.value)
    broken = {k: v for k, v in TASK.items() if k != "SLURM_LOCALID"}
    environment(broken)
    with pytest.raises(ValueError, match="SLURM_LOCALID in the environment is not set"):
        Launch.from_env()


@pytest.mark.parametrize(
    "variables, says",
    [
        (TASK, "srun starts 10 ranks but MASTER_ADDR is not set: export it before srun"),
        (TASK | {"MASTER_ADDR": "n1", "MASTER_PORT": ""}, "srun starts 10 ranks but MASTER_PORT"),
        (TASK | {"MASTER_ADDR": "n1", "MASTER_PORT": "x"}, "MASTER_PORT in the environment is 'x'"),
        (TASK | {"MASTER_ADDR": "n1", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000: it must"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set: start with torchrun or srun"),
        (TASK | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, ""),
        (INTERACTIVE, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_where_ranks_meet_must_be_said(environment, variables, says):
    environment(variables)
    try:
        Launch.from_env().check_rendezvous()
        said = ""
    except ValueError as error:
        said = str(error)
    assert said.startswith(says) and bool(said) == bool(says)


SRUN = """\
import os, subprocess, sys
from pathlib import Path
words = sys.argv[1:]
Path(os.environ["FAKE"], "words").write_text("\\n".join(words))
python = next(word for word in words if word.rpartition("/")[2].startswith("python"))
command, step = words[words.index(python) :], {"SLURM_STEP_ID": "0"}
step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
ranks = []
for rank in ("0", "1"):
    mine = {**os.environ, **step, "SLURM_PROCID": rank, "SLURM_NODEID": rank}
    ranks.append(subprocess.Popen([sys.executable, *command[1:]], env=mine))
Path(os.environ["FAKE"], "ranks").write_text(" ".join(str(rank.pid) for rank in ranks))
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


class Queue:
    """SLURM's commands as far as a job script knows them; `requeued` counts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        python = f"#!{sys.executable}\n"
        for command, body in {
            "srun": python + SRUN,
            "scontrol": '#!/bin/bash\necho "$@" >> "$FAKE/calls"\necho node7\n',
            "squeue": '#!/bin/bash\necho "$FAKE_STATE"\n',
        }.items():
            (folder / command).write_text(body)
            (folder / command).chmod(0o755)

    def start(self, state: str, *command: str, **more: str) -> subprocess.Popen:
        """Start a command as a job script in that state; sbatch gives it a session of its own."""
        clean = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
        job = SCRIPT | {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_SUBMIT_DIR": str(ROOT)}
        job |= {"FAKE": str(self.folder), "FAKE_STATE": state, "MASTER_ADDR": "127.0.0.1"}
        job |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "OUT": str(self.out)}
        return subprocess.Popen(
            ["bash", *command],
            cwd=ROOT,
            env=clean | job | {"OMP_NUM_THREADS": "1"} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def requeued(self) -> int:
        """Count how often the job was put back."""
        calls = self.folder / "calls"
        return calls.read_text().splitlines().count("requeue 7") if calls.exists() else 0


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)


@pytest.mark.parametrize(
    "codes, new, state, again",
    [
        ((0, 0), True, "RUNNING", False),  # done
        ((75, 75), True, "RUNNING", True),  # SIGUSR1 before the time limit
        ((75, 75), True, "COMPLETING", False),  # pre-empted or cancelled: SLURM knows which
        ((75, 75), True, "", False),  # SLURM does not answer
        ((2, 2), True, "RUNNING", False),  # a mistake
        ((1, 137), True, "RUNNING", True),  # a rank was killed, after a checkpoint
        ((1, 137), False, "RUNNING", False),  # before the first one: it would never end
        ((1, 137), True, "COMPLETING", False),
        ((138, 138), False, "RUNNING", False),  # SIGUSR1 before the first step
    ],
)
def test_when_a_job_is_put_back(queue, codes, new, state, again):
    saved = queue.out / "checkpoints"
    saved.mkdir(parents=True)
    (saved / "step_00000010").mkdir()
    (saved / "latest").write_text("step_00000010")
    made = f"os.makedirs({str(saved / 'step_00000020')!r}, exist_ok=True)" if new else "pass"
    (queue.folder / "rank.py").write_text(
        f"import os, sys\n{made}\nsys.exit({codes}[int(os.environ['SLURM_PROCID'])])\n"
    )
    script = "examples/slurm_ranks.sh"
    more = {"CHECKPOINTS": str(saved), "SLURM_CPUS_PER_TASK": "8"}
    job = queue.start(state, script, str(queue.folder / "rank.py"), **more)
    said = job.communicate(timeout=60)[0]
    assert job.returncode == max(codes), said
    assert queue.requeued() == again
    assert "--cpus-per-task=8" in (queue.folder / "words").read_text().splitlines()
    last = "step_00000020" if new else "step_00000010"
    assert f"job 7: exit code {max(codes)}, last checkpoint: {last}" in said


def test_the_first_node_is_where_ranks_meet(queue):
    (queue.folder / "rank.py").write_text(
        "import os, sys\ne = os.environ\n"
        "sys.stdout.write(f\"{e['MASTER_ADDR']} {e['MASTER_PORT']}\\n\")\n"
    )
    script = ("examples/slurm_ranks.sh", str(queue.folder / "rank.py"))
    job = queue.start("RUNNING", *script, MASTER_ADDR="", MASTER_PORT="", SLURM_JOB_ID="123456")
    said = job.communicate(timeout=60)[0]
    assert job.returncode == 0 and said.splitlines().count(f"node7 {20000 + 3456}") == 2, said
    assert (queue.folder / "calls").read_text() == "show hostnames node[7-8]\n"


SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 32 "
    "--vocab-size 100 --save-interval 1000000 --lr-warmup-iters 0"
).split()


@pytest.mark.prove
def test_a_job_that_is_told_that_its_time_is_over_saves_and_comes_back(queue, free_port):
    """The whole way of a job: script, ranks by srun, SIGUSR1, SIGTERM upon it, requeue, resume."""
    script = ["examples/cpu_two_nodes.slurm", *SMALL, "--train-iters"]
    port = {"MASTER_PORT": str(free_port())}
    job = queue.start("RUNNING", *script, "1000000", **port)
    log, deadline = queue.out / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [int(pid) for pid in (queue.folder / "ranks").read_text().split()]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for rank in ranks:
            os.kill(rank, number)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 75 and "Traceback" not in said, said
    assert "stopped by SIGUSR1 after iteration" in said and "the same command resumes" in said
    assert queue.requeued() == 1
    (saved,) = (queue.out / "checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    job = queue.start("RUNNING", *script, str(step + 3), SLURM_RESTART_COUNT="1", **port)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0 and f"at iteration {step}," in said, said
    rows = [json.loads(line)["iteration"] for line in log.read_text().splitlines()]
    assert rows == list(range(1, step + 4))


@pytest.mark.prove
def test_on_a_real_slurm(tmp_path):
    """What `make slurm-check` runs, where it can."""
    command = [sys.executable, "tests/slurm/check.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lines_that_copy_a_pair_to_each_node(tmp_path: Path) -> None:
    """Two nodes; a copy that was cut off is made again, and none is taken with another digest."""
    (tmp_path / "far").mkdir()
    data = tmp_path / "far" / "text"
    for end in ("bin", "idx"):
        Path(f"{data}.{end}").write_text(end)
    (tmp_path / "srun").write_text(
        "#!/bin/bash\nset -e\nshift\nfor node in n1 n2; do NEAR=$NEAR/$node \"$@\"; done\n"
    )
    (tmp_path / "srun").chmod(0o755)

    def submit(job: str = "true") -> int:
        there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(data)}
        there |= {"NEAR": str(tmp_path / "near")}
        script = f"{near_data.lines()}echo $DATA > {tmp_path}/said; {job}"
        done = subprocess.run(["bash", "-c", script], env=there, stderr=subprocess.DEVNULL)
        return done.returncode

    def digest() -> None:
        said = subprocess.run(
            ["sha256sum", "text.bin", "text.idx"], cwd=data.parent, capture_output=True, check=True
        )
        Path(f"{data}.sha256").write_bytes(said.stdout)

    copies = [tmp_path / "near" / node / "text.bin" for node in ("n1", "n2")]
    digest()
    copies[1].parent.mkdir(parents=True)
    copies[1].write_text("b")  # cut off: its digest is not there
    assert submit() == 0 and [copy.read_text() for copy in copies] == ["bin", "bin"]
    assert (tmp_path / "said").read_text() == f"{tmp_path}/near/text\n"
    made = [copy.stat().st_ino for copy in copies]
    assert submit("exit 7") == 7 and [copy.stat().st_ino for copy in copies] == made
    data.with_suffix(".bin").write_text("other")
    os.utime(f"{data}.sha256", ns=(2**62, 2**62))
    assert submit() == 1 and [copy.read_text() for copy in copies] == ["bin", "bin"]
    digest()
    os.utime(f"{data}.sha256", ns=(2**62, 2**62))
    assert submit() == 0 and [copy.read_text() for copy in copies] == ["other", "other"]
