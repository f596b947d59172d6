# SPDX-License-Identifier: Apache-2.0
"""Give tests a world of ranks: `world(2).run(fn, *args)` returns each rank's fn(comm, *args).

The ranks are started once for each world size and serve every test of the session. They are forked
from one process that has imported the program (tests/fork_server.py).
`fn` is a module-level function; it runs in the child from its own file, over an initialised gloo
group. When a rank raises, the test fails with that rank's traceback and the next test gets a fresh
world.
"""

import ctypes
import gc
import importlib
import importlib.util
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from mpu.launch import environment_defaults

os.environ.update(environment_defaults(os.environ))  # as a run does before it imports torch

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from tests import fork_server  # noqa: E402

TIMEOUT = 120.0
# A session has one process that ranks are forked from, so fork-check's is this one. Each rank that
# has an optimizer of torch's would import the last, which takes a second.
PRELOADED = [
    "pretrain_llama",
    "tests.conftest",
    "tests.run_ranks",
    "tools.forks.rank",
    "torch._dynamo",
]

# Files that take longest, the longest first, as --durations tells: of `make prove`, then of
# `make test`. Before them the one that counts what a rank allocates, as its processes must be new.
LONGEST = """
forecast/test_recording.py
test_slurm.py test_readme.py test_continuing_page.py
forecast/rehearsal/test_faults.py forecast/rehearsal/test_layouts.py tools/test_fork_check.py
tools/bisect/test_runs.py test_flag_sets.py test_context_run.py model/test_one_file.py
model/test_moe_parity.py forecast/planner/test_plan.py
forecast/test_dry_run.py forecast/rehearsal/test_whole_step.py forecast/rehearsal/test_rehearse.py
forecast/rehearsal/test_cpu.py
training/settings/test_update_rules.py model/test_frozen.py training/checkpoint/test_reshard.py
model/test_zero_parity.py training/run/test_saver.py
training/run/watch/test_numbers.py model/test_float8.py model/test_moe_router.py
model/test_pipeline_parity.py model/test_context_parity.py forecast/test_buffers.py
forecast/test_step_memory.py forecast/test_activations.py mpu/layers/float8/test_recipe.py
tools/test_gpu_check.py faults/test_hangs.py faults/test_failures.py tools/test_explain.py
model/test_parity.py model/test_worked_forks.py model/test_deepseek.py
training/checkpoint/test_sweep.py training/checkpoint/test_retain.py
training/faults/test_hang_watch.py training/faults/test_monitor.py
training/flags/test_public_scripts.py training/run/test_log.py tools/test_checkpoint_hf.py
test_continued_runs.py test_mistakes.py test_stages_run.py
""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Heed Ctrl-C in a shell's background job too, where it is ignored, and SIGHUP under nohup:
    what tests start inherits that, and some tests interrupt it. Hide GPUs, but from tests of them
    (`-m gpu`): a run without --device takes the CPU.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr", "")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()  # while tests are collected
    from training.run.peak_flops import measured_peak

    measured_peak.__defaults__ = (0.0,)  # one matmul, where a run takes 0.3 s of them


class Backwards(pytest.Dir):
    """A folder whose last file is collected first."""

    def collect(self) -> list[Any]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Let each second process begin at the other end: a file that one has compiled, half of a
    fresh clone's collection, is read by the other.
    """
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
        return Backwards.from_parent(parent, path=path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no process waits for another's last one."""
    order = {f"tests/{name}": n for n, name in enumerate(LONGEST)}
    files = {item: item.nodeid.split("::")[0] for item in items}
    items.sort(key=lambda item: (order.get(files[item], len(order)), files[item]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported and collected out of each later collection of garbage, and fork the
    process that ranks are forked from before a test starts a thread.
    """
    forking = {"world", "launcher"}
    if any(not forking.isdisjoint(getattr(item, "fixturenames", ())) for item in session.items):
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()
        fork_server.begin()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave out what is left, which pytest would look through five times."""
    gc.freeze()


@dataclass
class Comm:
    """What a test function is given: its rank, the size, and grids over the running world."""

    rank: int
    size: int
    store: Any

    def grid(
        self,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        instances: int = 1,
        memory: bool = False,
        query_groups: int = 0,
        order: tuple[str, ...] = ("tp", "cp", "dp", "pp"),
        ep: int = 0,
        needs_full_matrices: bool = False,
    ) -> Any:
        """Return a connected Grid of this world (groups are made once a layout).

        memory: its ranks share memory, as those of a run on one host do. order: the
        axes, fastest first. needs_full_matrices: for an optimizer that needs them.
        """
        from mpu.connect import share
        from mpu.grid import Grid
        from mpu.launch import Launch

        query_groups = query_groups if query_groups < tp else 0
        key = (
            tp,
            cp,
            pp,
            instances,
            memory,
            query_groups,
            order,
            ep,
            needs_full_matrices,
        )
        grids = self.__dict__.setdefault("grids", {})
        if key not in grids:
            launch = Launch(self.rank, self.size, self.rank, self.size)
            wait = timedelta(seconds=TIMEOUT)
            grid = Grid(
                self.size, tp, cp, pp, launch, "gloo", instances, query_groups, order,
                ep, needs_full_matrices=needs_full_matrices,
            )  # fmt: skip
            grid.add_groups(torch.device("cpu"), wait)
            if memory:
                share(grid, wait)
            grids[key] = grid
        return grids[key]


class OneLoop(dist.ProcessGroupGloo):
    """A gloo group on the same device as all others of this process.

    A device of its own has a thread that wakes up a hundred times a second: a world that holds the
    groups of many layouts would take several percent of a core in each rank.
    """

    device: ClassVar[Any] = None

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **since_2_15: Any
    ) -> None:
        if OneLoop.device is None:
            OneLoop.device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [OneLoop.device], timeout, 2
        super().__init__(store, rank, size, options)


def _child(rank: int, size: int, port: int, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = OneLoop  # what dist.new_group makes
    gc.freeze()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from mpu.launch import bind_loopback

    bind_loopback()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT * max(1.0, size / 4)),
    )
    comm, modules = Comm(rank, size, store), {}
    while (job := inbox.get()) is not None:
        path, name, args = job
        try:
            if path not in modules:
                spec = importlib.util.spec_from_file_location(f"world_{len(modules)}", path)
                assert spec is not None and spec.loader is not None
                modules[path] = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = modules[path]
                spec.loader.exec_module(modules[path])
            outbox.put((rank, getattr(modules[path], name)(comm, *args), None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


class World:
    """`size` ranks on gloo, alive until closed. start: "spawn", if this environment matters."""

    def __init__(self, size: int, start: str = "forkserver") -> None:
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, size + 1, is_master=True, wait_for_workers=False)
        ctx = mp.get_context(start)
        ctx.set_forkserver_preload(PRELOADED)
        self.outbox, self.inboxes = ctx.Queue(), [ctx.Queue() for _ in range(size)]
        self.ranks = [
            ctx.Process(
                target=_child,
                args=(r, size, self.store.port, self.inboxes[r], self.outbox),
                daemon=True,
            )
            for r in range(size)
        ]
        for process in self.ranks:
            process.start()
        self.broken = False

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run fn(comm, *args) on every rank; return the results in rank order."""
        path = sys.modules[fn.__module__].__file__
        for inbox in self.inboxes:
            inbox.put((path, fn.__name__, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT * max(1.0, self.size / 4)  # cores are few
        while len(results) < self.size:
            self.broken = True
            rank, result, error = self.outbox.get(timeout=max(0.1, deadline - time.monotonic()))
            if error is not None:
                self.close()
                pytest.fail(f"rank {rank} of {self.size}:\n{error}", pytrace=False)
            results[rank] = result
        self.broken = False
        return [results[r] for r in range(self.size)]

    def close(self) -> None:
        """Stop the ranks."""
        self.broken = True
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """world(n) -> the session's world of n ranks, started at first use."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in worlds or worlds[size].broken:
            worlds[size] = World(size)
        return worlds[size]

    yield get
    for each in worlds.values():
        each.close()


@pytest.fixture(autouse=True, scope="module")
def _trimmed() -> Iterator[None]:
    """Return to the system what a file's tests have freed, gigabytes after some: a fork copies the
    page tables of all of it, and some tests fork a hundred times.
    """
    yield
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launcher(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Any]:
    """The session's tests/launcher.py, which runs the program on several ranks."""
    from tests.launcher import Launcher

    folder = tmp_path_factory.mktemp("runs")
    launcher = Launcher(folder, free_port, mp.get_context("forkserver"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Return a function that finds a free TCP port on the loopback device."""

    def find() -> int:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    return find
