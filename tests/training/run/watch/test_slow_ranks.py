# SPDX-License-Identifier: Apache-2.0
"""Which rank or link is slow, from tables of times that were made up; real runs are in
tests/faults/test_slow_ranks.py.
"""

import math
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.launch import Launch
from training.run import gpu_health
from training.run.gpu_health import Health, read_health
from training.run.watch.slow_ranks import LINKS, Layout, Row, diagnose

NONE = {"tp": 0.0, "cp": 0.0, "dp": 0.0, "pp": 0.0}
STEP = 0.100


def layout(world: int, tp: int = 1, pp: int = 1) -> Layout:
    return Layout.of(Grid(world, tp, 1, pp, Launch(0, world)))


def test_each_axis_counts_on_one_link() -> None:
    """pp's waits are on the pipeline's link, those of the axes made of dp on dp's."""
    names = [name for names in LINKS.values() for name in names]
    assert list(LINKS) == list(NONE) and len(names) == len(set(names))
    for link, names in LINKS.items():
        assert link in names
        for name in names:
            assert isinstance(getattr(Grid(8, 2, 1, 2, Launch(0, 8)), name), Axis)


def clean(world: int, own: float = 0.080, axis: str = "dp", **links: float) -> list[Row]:
    """Return rows of ranks that differ in nothing; the rest of the step is a wait on the axis."""
    row = Row(STEP, 0.001, own, 0.0005, NONE | {axis: STEP - own - 0.001} | links)
    return [row] * world


def slower(rows: list[Row], rank: int, seconds: float, data: bool = False) -> list[Row]:
    """Let one rank work (or wait for data) longer, so that all others wait for it."""
    out = []
    for r, row in enumerate(rows):
        links = row.links
        if r != rank:
            links = {name: wait + seconds * (wait > 0) for name, wait in links.items()}
        own = row.own + seconds * (r == rank and not data)
        late = row.data + seconds * (r == rank and data)
        out.append(replace(row, step=row.step + seconds, own=own, data=late, links=links))
    return out


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("data", [False, True])
def test_the_rank_that_does_not_wait_is_the_slow_one(world: int, data: bool) -> None:
    rank = world - 1
    slow = diagnose(slower(clean(world), rank, 0.030, data), layout(world), None)
    assert slow is not None and slow.counts and slow.ranks == (rank,)
    assert slow.what == ("data" if data else "compute")
    assert str(slow) == (
        f"rank {rank} is slow in {slow.what}: 30.0 ms of each step of 130.0 ms (23%)"
    )


def test_stages_differ_and_are_compared_with_ranks_of_their_own() -> None:
    """tp 2, pp 2: the second stage has the head, and its second rank is slow."""
    rows = clean(2, own=0.050, axis="pp") + clean(2, own=0.090, axis="pp")
    where = layout(4, tp=2, pp=2)
    assert where.stages == ((0, 1), (2, 3))
    assert diagnose(rows, where, None) is None
    slow = diagnose(slower(rows, 3, 0.030), where, None)
    assert slow is not None and slow.ranks == (3,) and slow.what == "compute"


def test_a_stage_of_one_rank_is_compared_with_its_youth() -> None:
    young = [clean(1, own=0.050, axis="pp")[0], clean(1, own=0.090, axis="pp")[0]]
    where = layout(2, pp=2)
    assert diagnose(young, where, None) is None and diagnose(young, where, young) is None
    slow = diagnose(slower(young, 0, 0.030), where, young)
    assert slow is not None and slow.ranks == (0,) and slow.what == "compute"


def test_a_link_is_slow_where_even_the_last_to_come_waits() -> None:
    """tp 2, dp 2: the ranks 2 and 3 take longer over tp; 0 and 1 wait for them over dp."""
    base = clean(4, own=0.080, axis="tp", dp=0.001)
    rows = [
        replace(
            row,
            step=STEP + 0.03,
            links=row.links | ({"tp": 0.049} if r >= 2 else {"dp": 0.031}),
        )
        for r, row in enumerate(base)
    ]
    slow = diagnose(rows, layout(4, tp=2), None)
    assert slow is not None and slow.counts
    assert str(slow).startswith("the tp link of ranks 2, 3 is slow: 30.0 ms of each step of 130.0")


def test_the_only_link_of_an_axis_is_compared_with_its_youth() -> None:
    young = clean(2)
    rows = [replace(r, step=STEP + 0.03, links=NONE | {"dp": 0.049}) for r in young]
    assert diagnose(rows, layout(2), None) is None
    slow = diagnose(rows, layout(2), young)
    assert slow is not None and slow.counts and slow.ranks == (0, 1) and slow.what == "dp"


def test_a_thousand_tables_of_chance_name_nobody() -> None:
    draw = random.Random(5)
    for case in range(1000):
        world = draw.choice([2, 4, 8])
        tables = []
        for _ in range(2):
            own = [0.080 + draw.gauss(0, 0.001) for _ in range(world)]
            last = max(own)
            tables.append(
                [
                    Row(STEP, 0.001, x, 0.001, NONE | {"dp": 0.01 + last - x + draw.random() / 1e3})
                    for x in own
                ]
            )
        slow = diagnose(tables[0], layout(world), tables[1])
        assert slow is None or not slow.counts, f"case {case}: {slow}"


def test_a_gpu_with_a_lower_clock_is_named() -> None:
    rows = [replace(row, health=Health(1980.0, 60.0, 650.0)) for row in clean(4)]
    assert diagnose(rows, layout(4), None) is None
    rows[1] = replace(rows[1], health=Health(1095.0, 87.0, 310.0))
    slow = diagnose(rows, layout(4), None)
    assert slow is not None and slow.counts
    assert str(slow).startswith("rank 1 is slow in compute: 44.7 ms of each step of 100.0 ms (45%)")
    assert str(slow).endswith("; its GPU runs at 1,095 MHz, 87 C, 310 W")


# what is used of NVML; a device without sensors answers NVML_ERROR_NOT_SUPPORTED
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = (void *)0x123456789abc;
  return strcmp(uuid, "GPU-12-34") ? 6 : 0;
}
static int give(void *device, int right, unsigned value, unsigned *out) {
  *out = value;
  return device == (void *)0x123456789abc && right ? CODE : 2;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *x) { return give(d, kind == 1, 1410, x); }
int nvmlDeviceGetTemperature(void *d, int of, unsigned *x) { return give(d, of == 0, 83, x); }
int nvmlDeviceGetPowerUsage(void *d, unsigned *x) { return give(d, 1, 690000, x); }
"""


@pytest.mark.parametrize(
    "uuid, code, known", [("12-34", 0, True), ("12-34", 3, False), ("5", 0, False)]
)
def test_a_gpu_is_read_by_the_drivers_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uuid: str, code: int, known: bool
) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler is here")
    (tmp_path / "nvml.c").write_text(NVML)
    made = str(tmp_path / "nvml.so")
    words = [compiler, "-shared", "-fPIC", f"-DCODE={code}", "-o", made, str(tmp_path / "nvml.c")]
    subprocess.run(words, check=True)
    properties: Any = lambda device: SimpleNamespace(uuid=uuid)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(gpu_health, "LIBRARY", made)
    gpu_health._open.cache_clear()
    health = read_health(torch.device("cuda", 0))
    gpu_health._open.cache_clear()
    assert (health == Health(1410.0, 83.0, 690.0)) is known
    assert math.isnan(health.clock) is not known


def test_without_nvml_and_on_a_cpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_health, "LIBRARY", "libabsent.so.1")
    gpu_health._open.cache_clear()
    assert read_health(torch.device("cuda", 0)).words() == ""
    assert read_health(torch.device("cpu")).words() == ""
    gpu_health._open.cache_clear()
