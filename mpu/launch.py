# SPDX-License-Identifier: Apache-2.0
"""Read the rank, world and rendezvous from the environment that the launcher (torchrun, srun,
mpirun, ...) has set. Compute the environment variables that CUDA, its libraries and torch read at
startup, unless the user has set them.
"""

import fnmatch
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# torch 2.11 to 2.13 read all of these, with the first taking precedence. The last is the newest
# name; torch 2.9 ignored it on CUDA (pytorch/pytorch#183387).
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
BLOCKING, CONNECTIONS = "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"
CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
MOST_PORT = 65535

# Variables that let torch or a library compute fp32 products in lower precision, with the values
# that prevent it. Container images set the first (NVIDIA's) and the last (AWS's for Graviton).
TF32 = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0",
    "HIPBLASLT_ALLOW_TF32": "0",
}  # fmt: skip
NARROW = {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"}
# Other variables that change the bits of a run, or how it runs, on a GPU and on a CPU; "*" matches
# any suffix. docs/numerics.md explains each. A run logs those that are set.
ON_GPU = (
    "CUDA_MODULE_LOADING", *ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO",
    CONNECTIONS, BLOCKING, CUDNN_LAST, *TF32,
    "TORCH_BLAS_PREFER_*", "DISABLE_ADDMM_CUDA_LT", "CUBLAS_*", "CUBLASLT_*",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B", "TORCH_CUDNN_V8_API_DISABLED", "PYTORCH_TUNABLEOP_*",
    "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_M??_*",
    "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_TUNER_*", "NCCL_CONF_FILE", "RCCL_MSCCL*",
    "NVTE_*", "CK_TILE_*", "FLASH_ATTENTION_*", "HIPBLASLT_*", "ROCBLAS_*", "MIOPEN_*",
    "TORCH_ROCM_*", "HSA_OVERRIDE_GFX_VERSION", "TRITON_F32_DEFAULT", "TRITON_INTERPRET",
    "TORCH_LINEAR_FLATTEN_3D",
)  # fmt: skip
ON_CPU = (
    *NARROW, "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS",
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE",
    "OPENBLAS_CORETYPE", "TORCH_MKLDNN_MATMUL_*", "KMP_DETERMINISTIC_REDUCTION",
    "TORCH_LINEAR_FLATTEN_3D",
)  # fmt: skip


class Names(NamedTuple):
    """The variables in which a launcher passes a process its rank, the world size, and its place on
    the node. mark: the variable that identifies this launcher. local_world: "" if the launcher
    passes it in another form (`_local_world`).
    """

    launcher: str
    mark: str
    rank: str
    world: str
    local_rank: str
    local_world: str = ""


def _with(prefix: str, launcher: str) -> Names:
    names = (f"{prefix}_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return Names(launcher, f"{prefix}_RANK", *names)


# The first launcher whose world has several ranks is used. mpirun precedes srun, with which it may
# start its daemons in a SLURM job: SLURM's ranks are then those of the daemons.
LAUNCHERS = (
    _with("OMPI_COMM_WORLD", "mpirun"),  # Open MPI
    Names("mpirun", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
          "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _with("MV2_COMM_WORLD", "mpirun"),  # MVAPICH2
    Names("mpiexec", "PMI_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    Names("mpiexec", "PALS_RANKID", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID",
          "PALS_LOCAL_SIZE"),  # Cray PALS, as the line above
    _with("JSM_NAMESPACE", "jsrun"),
    Names("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Names("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)  # fmt: skip
# {variable of a launcher that passes only part of it: (variable, its value in a run of one rank)}
PARTLY = {
    "PMI_RANK": ("PMI_SIZE", "1"), "PMIX_RANK": ("", ""), "ALPS_APP_PE": ("", ""),
    "PBS_TASKNUM": ("PBS_TASKNUM", "1"), "PBS_NODENUM": ("PBS_NODENUM", "0"),
}  # fmt: skip
# {variable that identifies a launcher: the launcher's name}; the first that is set is used
MARKS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    **{names.mark: names.launcher for names in LAUNCHERS},
}  # fmt: skip
SHORTEST, LONGEST = 16, 4096  # bytes of the run's secret


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the ranks, from the launcher: MASTER_ADDR and MASTER_PORT.

    agent: torchrun's agent keeps the store, across restarts. secret: shared by only this run's
    ranks (docs/security.md); b"" if none is set.
    """

    host: str = ""
    port: int = 0
    agent: bool = False
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def from_env(cls) -> "Rendezvous":
        """Read the environment. Raises ValueError, and OSError for WEFT_SECRET_FILE."""
        e, port = os.environ, os.environ.get("MASTER_PORT", "")
        digits = port.isascii() and port.isdigit() and len(port) < 10
        return cls(
            e.get("MASTER_ADDR", ""),
            int(port) if digits and int(port) <= MOST_PORT else 0,  # check_rendezvous reports it
            e.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_secret(e.get("WEFT_SECRET"), e.get("WEFT_SECRET_FILE")),
        )


@dataclass(frozen=True)
class Launch:
    """This process's rank in the world and on its node, and their sizes, from the launcher."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = ""  # the one of LAUNCHERS whose variables were read, if any
    attempt: int = 0  # number of earlier restarts, as counted by this node's launcher
    error_file: str = field(default="", compare=False)  # torchrun's file for this rank's error
    point: Rendezvous = field(default=Rendezvous(), compare=False)

    @classmethod
    def from_env(cls) -> "Launch":
        """Read the variables of torchrun (RANK, WORLD_SIZE, ...), or else those of LAUNCHERS; a
        plain `python` run is a world of one, even in a SLURM job in which no step has begun.

        Raises ValueError, also if an unknown launcher's variables are incomplete.
        """
        e = os.environ
        if {"RANK", "WORLD_SIZE"} & e.keys() or (names := _launcher_of(e)) is None:
            world = _number("WORLD_SIZE", "1")
            launch = cls(
                _number("RANK", "0"),
                world,
                _number("LOCAL_RANK", "0"),
                _number("LOCAL_WORLD_SIZE", str(world)),
                attempt=_number("TORCHELASTIC_RESTART_COUNT", "0"),
                error_file=e.get("TORCHELASTIC_ERROR_FILE", ""),
            )
        else:
            launch = cls(
                _number(names.rank),
                _number(names.world),
                _number(names.local_rank),
                _local_world(names),
                launcher=names.launcher,
            )
        if launch.rank >= launch.world or launch.local_rank >= launch.local_world:
            raise ValueError(
                f"the environment says rank {launch.rank} of {launch.world}, and on this node "
                f"{launch.local_rank} of {launch.local_world}: a rank must be below the size"
            )
        return replace(launch, point=Rendezvous.from_env()) if launch.world > 1 else launch

    def check_rendezvous(self) -> None:
        """Raise ValueError if there are several ranks but no rendezvous address."""
        if self.world == 1:
            return
        needed = ("MASTER_ADDR", "MASTER_PORT")
        missing = [
            name
            for name in (needed if self.launcher else ("RANK", *needed))
            if not os.environ.get(name)
        ]
        if not missing:
            if not 0 < (port := _number("MASTER_PORT")) <= MOST_PORT:
                raise ValueError(f"MASTER_PORT is {port}: it must be from 1 to {MOST_PORT}")
            return
        if not self.launcher:
            raise ValueError(
                f"WORLD_SIZE is {self.world} but {missing[0]} is not set: start with torchrun or "
                "srun"
            )
        how = "export it before srun, as examples/slurm_ranks.sh does"
        if self.launcher != "srun":
            how = (
                "on every rank set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free "
                "port of this host (docs/slurm.md)"
            )
        raise ValueError(
            f"{self.launcher} starts {self.world} ranks but {missing[0]} is not set: {how}"
        )


ASK = Launch(-1, 0)  # the default of a Grid: read it from the launcher


def _number(name: str, default: str | None = None) -> int:
    """Read a count from the environment. Raises ValueError."""
    text = os.environ.get(name, default)
    if text is None or not (text.isascii() and text.isdigit()):
        found = "is not set" if text is None else f"is {text!r}"
        raise ValueError(f"{name} in the environment {found}: it must be a whole number >= 0")
    return int(text)


def _launcher_of(environ: Mapping[str, str]) -> Names | None:
    """Return the Names of the launcher that started this process as one of several ranks, or None.

    Raises ValueError if a launcher did that but does not set all the variables of LAUNCHERS.
    """
    known = [names for names in LAUNCHERS if names.mark in environ]
    several = next((names for names in known if _number(names.world) > 1), None)
    for name, (size, one) in PARTLY.items():
        if not known and name in environ and environ.get(size) != one:
            raise ValueError(
                f"{name} is {environ[name]} in the environment, so a launcher started this process "
                "as one of several ranks, but not all of their numbers are set: set RANK, "
                "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (0, 1, 0 and 1 for a run of one "
                "rank), or start with torchrun, srun or mpirun"
            )
    return several


def _local_world(names: Names) -> int:
    """Return the number of ranks that the launcher started on this node. Raises ValueError."""
    if names.launcher == "srun":
        per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        return tasks_of_node(per_node, _number("SLURM_NODEID"))
    if names.launcher == "flux":
        world, nodes = _number("FLUX_JOB_SIZE"), _number("FLUX_JOB_NNODES")
        if not nodes or world % nodes:
            raise ValueError(
                f"flux runs {world} tasks on {nodes} nodes, and does not say how many on this one: "
                "start the same number on each node (flux run --tasks-per-node)"
            )
        return world // nodes
    return _number(names.local_world)


def tasks_of_node(text: str, node: int) -> int:
    """Return the number of tasks of a SLURM step on its node `node`. Raises ValueError.

    text: the tasks of all nodes in SLURM's format: "8(x15),4".
    """
    left = node
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        left -= int(times or 1)
        if left < 0:
            return int(count)
    raise ValueError(
        f"SLURM_STEP_TASKS_PER_NODE in the environment is {text!r}: it does not say how many tasks "
        f"run on node {node}"
    )


def run_secret(text: str | None, path: str | None) -> bytes:
    """Return the secret of WEFT_SECRET (text) or in the file WEFT_SECRET_FILE (path).

    Returns b"" if neither is set. Raises ValueError, and OSError if the file cannot be read.
    """
    if text is not None and path is not None:
        raise ValueError("WEFT_SECRET and WEFT_SECRET_FILE are both set: set one of them")
    if path is not None:
        secret, name = _content(path).strip(), f"WEFT_SECRET_FILE {path}"
    elif text is not None:
        secret, name = os.fsencode(text).strip(), "WEFT_SECRET"
    else:
        return b""
    if not SHORTEST <= len(secret) <= LONGEST:
        raise ValueError(
            f"{name} has {len(secret)} bytes: it must have {SHORTEST} to {LONGEST}, such as the "
            "output of `openssl rand -hex 32`"
        )
    return secret


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not block on a FIFO
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"WEFT_SECRET_FILE {path} is not a file")
        if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"WEFT_SECRET_FILE {path} may be read or written by other users: it must belong "
                "to you and have mode 600 or 400"
            )
        return os.read(fd, LONGEST + 2)
    finally:
        os.close(fd)


def launched_by() -> str:
    """Return "torchrun", the name of one of LAUNCHERS, or "" for none of them."""
    return next((name for mark, name in MARKS.items() if mark in os.environ), "")


def shares_cores() -> bool:
    """Return whether a rank should use its share of the node's cores, as no number was set.

    torchrun sets OMP_NUM_THREADS=1 if the user did not, which would leave cores idle.
    """
    return launched_by() == "torchrun" and os.environ.get("OMP_NUM_THREADS") in (None, "1")


def visible_gpus() -> str | None:
    """Return the value of the variable that lists the visible GPUs, or None if none is set."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return next((os.environ[name] for name in names if name in os.environ), None)


def hides_gpus(visible: str | None) -> bool:
    """Return whether the list deliberately hides all GPUs: "", "-1", or SLURM's "NoDevFiles"."""
    if visible is None:
        return False
    first = visible.partition(",")[0].strip()
    return first in ("", "NoDevFiles") or first.startswith("-")


def deprioritizes_cudnn() -> bool:
    """Return whether the user asks torch to prefer any other attention to cuDNN's."""
    return os.environ.get(CUDNN_LAST) == "1"


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def launches_block() -> bool:
    """Return whether the user asks CUDA to wait for each kernel at its launch."""
    return os.environ.get(BLOCKING, "0") not in ("", "0")


def has_one_queue() -> bool:
    """Return whether all streams share one queue of the GPU, as Megatron's scripts request."""
    return os.environ.get(CONNECTIONS) == "1"


def bind_loopback() -> None:
    """Make gloo use the loopback device if all ranks are on this host.

    Otherwise gloo resolves the host's own name, which fails on many laptops.
    """
    if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def environment_defaults(environ: Mapping[str, str], argv: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables to set before torch is imported, for torch, CUDA and the allocator.

    argv: the run's command line, from which it follows whether CUDA must load all kernels at
    startup (`loads_eagerly`). Expandable segments grow in place, which avoids fragmentation by
    freed memory of other sizes; torch's symmetric memory does not use that allocator. Variables set
    by the user are kept, except those that would compute fp32 in lower precision: torch and oneDNN
    read these when they are loaded, NVIDIA's libraries when CUDA starts.
    """
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # its warnings are 20 lines of C++ frames
    if loads_eagerly(argv):
        defaults["CUDA_MODULE_LOADING"] = "EAGER"
    if not any(name in environ for name in ALLOCATOR):
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    defaults = {name: value for name, value in defaults.items() if name not in environ}
    return defaults | as_fp32(environ, argv)


def as_fp32(environ: Mapping[str, str], argv: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that must be set so that fp32 products are computed in fp32.

    argv: the command line, in which --allow-tf32 allows TF32. Variables that are not in the
    environment are left out, as their default is fp32.
    """
    values = _values(argv)
    given = next((values[name].lower() for name in ALLOW_TF32 if name in values), "no")
    allowed = given not in ("no", "0", "false")
    exact = NARROW if allowed else TF32 | NARROW
    return {name: value for name, value in exact.items() if environ.get(name, value) != value}


def rounding_variables() -> list[str]:
    """Return the variables of `as_fp32` that are in the environment, set by it or by the user."""
    return [name for name in (*TF32, *NARROW) if name in os.environ]


# the names of a flag that are read before the others, as training/flags translates them
STAGES = (
    "--pipeline-model-parallel-size", "--pp", "--pp-size", "--pipeline-parallel-size",
    "--pipeline-parallel-degree", "--pipeline-parallel", "--pipe-parallel-size",
    "--parallelism.pipeline-parallel-degree",
)  # fmt: skip
ALLOW_TF32 = ("--allow-tf32", "--tf32")


def _values(argv: Sequence[str]) -> dict[str, str]:
    """Return the value of each flag in a command line, "" if it has none."""
    words = [part for word in argv for part in word.split("=", 1)]
    return {
        flag.replace("_", "-"): "" if value.startswith("--") else value
        for flag, value in zip(words, [*words, ""][1:], strict=True)
        if flag.startswith("--")
    }


def loads_eagerly(argv: Sequence[str]) -> bool:
    """Return whether a run with this command line must load all kernels when CUDA starts.

    By default CUDA loads each kernel at its first launch, which may wait for running kernels: in a
    pipeline for a receive whose sender waits for this rank, under --tp-comm-overlap symmetric for a
    kernel that waits for another rank's flag. Loading all of them takes seconds and several hundred
    MB of each GPU (pytorch/pytorch#86509), so other runs do not. CUDA reads the setting when it
    starts, which may be before the command line is parsed: so this looks at its raw words.
    """
    values = _values(argv)
    overlap = values.get("--tp-comm-overlap", "none")
    stages = next((values[name] for name in STAGES if name in values), "1")
    return stages not in ("", "1") or overlap not in ("none", "ring")


def set_deterministic() -> None:
    """Set, before CUDA starts, a cuBLAS workspace and an NCCL algorithm with reproducible bits.

    Ring, as in Megatron: it adds in the order of the ranks on the ring. NVLS adds in the switch,
    and the choice between algorithms may differ between runs. Variables set by the user are kept.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")


def cuda_settings() -> list[str]:
    """Return a log line with the variables of ON_GPU that are set; empty if there are none."""
    return _settings("environment of CUDA", ON_GPU)


def cpu_settings() -> list[str]:
    """Return a log line with the variables of ON_CPU that are set; empty if there are none."""
    return _settings("environment of the CPU's libraries", ON_CPU)


def _settings(what: str, names: Sequence[str]) -> list[str]:
    present = dict.fromkeys(found for name in names for found in fnmatch.filter(os.environ, name))
    settings = [f"{name}={os.environ[name]}" for name in present]
    return [f"{what}: {', '.join(settings)}"] if settings else []
