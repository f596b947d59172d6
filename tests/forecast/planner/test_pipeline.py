# SPDX-License-Identifier: Apache-2.0
"""What the planner knows of schedules comes from the schedules themselves."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forecast.planner.cluster import read_cluster
from forecast.planner.pipeline import bubble, in_flight, paired
from mpu.pipeline.schedules import CHUNKS, OVERLAPPING, build
from mpu.pipeline.simulate import Costs, peak_activations, simulate
from tools import plan

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("again", [False, True])
def test_bubbles_are_the_published_ones(again: bool) -> None:
    """In units of 1F1B's: (p - 1) (F + B - W) of zb-h1, (p - 1) F of a chunk of zb-v."""
    assert bubble("1f1b", 5, 9, 1, again) == bubble("interleaved", 4, 8, 3, again) == 1
    assert bubble("zb-h1", 4, 400, 1, again) == pytest.approx((1 + again) / (3 + again))
    assert bubble("zb-v", 4, 400, 2, again) == pytest.approx(1 / 2 if again else 1 / 3)
    assert bubble("zb-2p", 4, 400, 1, again) == 0  # another program's


@pytest.mark.parametrize("name", CHUNKS)
def test_a_short_pipeline_stands_for_a_long_one(name: str) -> None:
    p, m, v = 16, 96, CHUNKS[name]
    stages = p * v
    costs = Costs([1.0] * stages, [2.0] * stages, [1.0] * stages)
    played = simulate(build(name, p, m, v), costs).bubble / (4 * (p - 1))
    assert bubble(name, p, m, v, True) == pytest.approx(played, rel=0.15)


@pytest.mark.parametrize("name", CHUNKS)
def test_what_is_in_flight_is_the_walks(name: str) -> None:
    chance, v = random.Random(name), CHUNKS[name]
    for p, m in ((1, 4), (2, 2), (4, 5), (4, 20)):
        if name == "interleaved":
            m = -(-m // p) * p
        if p * v == v and v > 1:
            continue  # virtual stages need a pipeline
        for_b, for_w = chance.random(), chance.random()
        both = (in_flight(name, p, m, v) * (for_b, for_w)).sum(2).max(1)
        walked = peak_activations(build(name, p, m, v), [for_b] * p * v, [for_w] * p * v)
        assert both == pytest.approx([most for _, _, most in walked])
        if name in OVERLAPPING:
            overlapped = build(name, p, m, v, overlaps=True)
            walked = peak_activations(overlapped, [1.0] * p * v, [0.0] * p * v)
            both = in_flight(name, p, m, v, overlaps=True)[:, :, 0].max(1)
            assert both == pytest.approx([most for _, _, most in walked])
            pairs = [len(overlapped.overlapped_forwards(rank)) for rank in range(p)]
            assert paired(name, p, m, v) == pytest.approx(max(pairs) / (m * v))


@pytest.mark.prove
def test_the_bytes_of_many_layouts_are_near_the_dry_runs() -> None:
    asked: plan.Question = {"global-batch-size": 128}
    plans = plan.plans_of("8B", read_cluster("h100_128_nodes").of(4), asked)
    piped = [n for n, each in enumerate(plans.layouts) if each.pp > 1]
    for n in random.Random(7).sample(piped, 30):
        assert plans.bytes[n] == pytest.approx(plans.recorded(n).bytes, rel=0.12), plans.layouts[n]


NEW = '''

def one_by_one(p: int, m: int) -> Schedule:
    return Schedule("one-by-one", (_one_f_one_b(_actions("F", m), _backwards(m), 1),) * p, m)
'''
PROGRAM = """
from tools import plan
from forecast.planner.cluster import read_cluster
plans = plan.plans_of("1B", read_cluster("h100_8_nodes").of(1), {"global-batch-size": 64})
mine = [n for n, e in enumerate(plans.layouts) if e.schedule == "one-by-one" and e.pp == 4]
like = [plans.layouts[n].__dict__ | {"schedule": "1f1b"} for n in mine]
theirs = {repr(e.__dict__): n for n, e in enumerate(plans.layouts)}
for n, each in list(zip(mine, like))[:1]:
    other = theirs[repr(each)]
    print(plans.times.bubble[n] > 3 * plans.times.bubble[other])
    print(plans.recorded(n).bytes < plans.recorded(other).bytes)
    print(abs(plans.bytes[n] / plans.recorded(n).bytes - 1) < 0.12)
"""


@pytest.mark.prove
def test_a_new_schedule_is_planned(tmp_path: Path) -> None:
    """Two lines in mpu/pipeline/schedules.py: its function, and its name."""
    for room in ("mpu", "model", "training", "forecast", "tools"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_llama.py", tmp_path)
    file = tmp_path / "mpu" / "pipeline" / "schedules.py"
    text = file.read_text() + NEW
    for old, new in (('CHUNKS = {', 'CHUNKS = {"one-by-one": 1, '),
                     ('makers = {', 'makers = {"one-by-one": one_by_one, ')):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True"] * 3
