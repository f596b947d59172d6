# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI's launchers and those of LSF, Flux and Cray start: what a process takes from them,
one inside another too, and what it refuses by name (srun's: tests/test_slurm.py).

The variables are those that each launcher sets. Where an mpirun is on the machine, it is run too.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpu.launch import Launch, launched_by

ROOT = Path(__file__).resolve().parent.parent
PREFIXES = (
    "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "PALS_", "JSM_", "FLUX_", "SLURM", "ALPS_", "PBS_",
    "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_",
)  # fmt: skip
# rank 5 of 8, the second of four on its node
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "1974337537", "OMPI_UNIVERSE_SIZE": "8",
}  # fmt: skip
ONE = OPEN_MPI | {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_RANK": "0",
}  # fmt: skip
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "6"}
HYDRA = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
CRAY = PMI | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PALS_RANKID": "5",
              "PALS_NODEID": "1"}  # fmt: skip
AURORA = PMI | {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "PMIX_RANK": "5",
}  # fmt: skip
FLUX = PMI | {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1",
              "FLUX_JOB_NNODES": "2"}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1",
}  # fmt: skip
# by which mpirun starts a daemon on each other node of a SLURM job; ranks inherit its variables
DAEMON = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "1",
}  # fmt: skip
SHELL = {  # the shell that salloc opens on a node is a step of one task
    "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "PMIX_RANK": "0",
}  # fmt: skip
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "12"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
MEET = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def no_launcher() -> dict[str, str]:
    """Return this environment without what any launcher says."""
    return {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}


@pytest.fixture
def become(monkeypatch):
    """Return a function that makes these the only variables of a launcher."""

    def be(variables):
        clean = no_launcher()
        for name in os.environ.keys() - clean.keys():
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return be


@pytest.mark.parametrize("variables, launcher", [
    (OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (MVAPICH, "mpirun"), (CRAY, "mpiexec"),
    (AURORA, "mpiexec"), (JSRUN, "jsrun"), (FLUX, "flux"), (SRUN, "srun"),
    (SRUN | PMI | {"PMIX_RANK": "5"}, "srun"),  # srun --mpi=pmi2 or pmix
])  # fmt: skip
def test_a_rank_is_what_its_launcher_says(become, variables, launcher):
    become(variables)
    found = Launch.from_env()
    assert found == Launch(5, 8, 1, 4, launcher) and launched_by() == launcher
    with pytest.raises(ValueError) as refused:
        found.check_rendezvous()
    assert str(refused.value).startswith(f"{launcher} starts 8 ranks but MASTER_ADDR is not set: ")
    become(variables | MEET)
    Launch.from_env().check_rendezvous()
    assert Launch.from_env().point.port == 29500


@pytest.mark.parametrize("variables, launch", [
    (OPEN_MPI | TORCHRUN, Launch(2, 3, 0, 1)),  # mpirun torchrun ...
    (FLUX | TORCHRUN, Launch(2, 3, 0, 1)),
    (OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"}, Launch()),  # a run of its own, said by the user
    (OPEN_MPI | {"WORLD_SIZE": "128"}, Launch(0, 128, 0, 128)),  # a dry run there
    (ONE, Launch()),  # mpirun -np 1
    (HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"}, Launch()),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch()),
    (SCRIPT | OPEN_MPI, Launch(5, 8, 1, 4, "mpirun")),  # mpirun in a job script of SLURM
    (DAEMON | OPEN_MPI, Launch(5, 8, 1, 4, "mpirun")),  # on another node of it
    (DAEMON | HYDRA, Launch(5, 8, 1, 4, "mpirun")),
    (SHELL | OPEN_MPI, Launch(5, 8, 1, 4, "mpirun")),  # mpirun in salloc's shell
    (SHELL, Launch()), (SCRIPT, Launch()), (ONE | SHELL, Launch()),
    (ONE | SRUN, Launch(5, 8, 1, 4, "srun")),  # mpirun -np 1 bash, where srun is called
    (ONE | HYDRA, Launch(5, 8, 1, 4, "mpirun")),
    ({"OMPI_MCA_coll_hcoll_enable": "0", "I_MPI_ROOT": "/opt/intel", "PBS_JOBID": "7",
      "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "LSB_JOBID": "9"}, Launch()),  # images, job shells
])  # fmt: skip
def test_one_launcher_inside_another(become, variables, launch):
    become(variables)
    assert Launch.from_env() == launch


@pytest.mark.parametrize("variables, says", [
    ({"PMIX_RANK": "1"}, "PMIX_RANK is 1 in the environment, so a launcher started this process "),
    (PMI, "PMI_RANK is 5 in the environment, so a launcher started"),
    ({"PMI_RANK": "0"}, "PMI_RANK is 0 in the environment, so a launcher"),
    ({"ALPS_APP_PE": "3"}, "ALPS_APP_PE is 3 in the environment"),
    ({"PBS_NODENUM": "1", "PBS_TASKNUM": "1"}, "PBS_NODENUM is 1 in the environment"),
    ({k: v for k, v in OPEN_MPI.items() if k != "OMPI_COMM_WORLD_LOCAL_RANK"},
     "OMPI_COMM_WORLD_LOCAL_RANK in the environment is not set"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE in the environment is 'm"),
    (HYDRA | {"PMI_RANK": "8"}, "the environment says rank 8 of 8, and on this node 1 of 4"),
    (FLUX | {"FLUX_JOB_NNODES": "3"}, "flux runs 8 tasks on 3 nodes, and does not say how many"),
])  # fmt: skip
def test_what_does_not_say_all_is_refused_by_name(become, variables, says):
    become(variables)
    with pytest.raises(ValueError) as refused:
        Launch.from_env()
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)


FLAGS = """--mock-data --vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2
    --seq-length 32 --train-iters 2 --lr 1e-3 --device cpu --micro-batch-size 1
    --global-batch-size 2""".split()
COMMAND = [sys.executable, "pretrain_llama.py", *FLAGS]


@pytest.mark.prove
def test_two_ranks_of_mpirun_are_one_run(free_port):
    """The program itself, in the two environments that Open MPI's mpirun -np 2 makes."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in "01":
        names = ("RANK", "LOCAL_RANK", "NODE_RANK")
        env = {f"OMPI_COMM_WORLD_{name}": rank for name in names} | {"PMIX_RANK": rank}
        env |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        ranks.append(subprocess.Popen(
            COMMAND, cwd=ROOT, env=no_launcher() | env | meet, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ))  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "= 2 ranks" in said[0] and "iteration" not in said[1]


@pytest.mark.prove
@pytest.mark.parametrize("mpirun", [
    "mpirun.openmpi --allow-run-as-root --oversubscribe", "mpirun.mpich",
])  # fmt: skip
def test_a_real_mpirun(mpirun, free_port):
    words = mpirun.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    env = no_launcher() | {"OMP_NUM_THREADS": "1"}
    run = [*words, "-np", "2", *COMMAND]
    alone = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert alone.returncode == 2
    assert "mpirun starts 2 ranks but MASTER_ADDR is not set: give every rank" in alone.stderr
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "= 2 ranks" in done.stdout, done.stderr
