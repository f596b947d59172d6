# SPDX-License-Identifier: Apache-2.0
"""Memory over a step: its fullest moment is the dry run's number, and the picture shows just that.

Layouts are drawn as for the rehearsal (tests/forecast/rehearsal/drawn_layouts.py).
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pretrain_llama
from forecast import dry_run, memory_picture
from forecast.dry_run import step_memory
from forecast.like_ranks import ALONE, followed, turns
from forecast.planner.rank_bytes import few_layers
from forecast.recording import ACTIVATIONS, HOST, few_micro_batches, record, recordings_of
from forecast.traffic import SMALL
from forecast.traffic import rows as traffic_rows
from mpu.pipeline.schedules import Action, build
from mpu.pipeline.simulate import Costs, simulate
from mpu.pipeline.steps import plan
from tests.forecast.rehearsal.drawn_layouts import accepted
from tests.forecast.rehearsal.test_drawn_layouts import MODEL, WITHOUT
from tests.forecast.test_activations import is_few, layer_bytes
from tests.sampling import sampled
from tests.training.small_llama import read
from tools.pictures.style import shapes
from tools.pictures.timeline import in_flight, rows
from training.flags.parse import parse
from training.run.pipeline_stages import rank_stages
from training.run.text import in_units
from training.settings.pipeline_schedule import schedule_of

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 4 --micro-batch-size 1"


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_moment_of_a_drawn_layout_is_the_dry_runs_number(seed):
    world, _, flags = accepted(seed, MODEL, WITHOUT)
    config = parse([*MODEL, *flags.split(), "--dry-run"], world)
    found = recordings_of(config, pretrain_llama)
    text = dry_run.report(config, pretrain_llama)
    steps = [step_memory(config, recording) for recording in found]
    totals = [max(moment.total for moment in step) for step in steps]
    told = re.findall(r"^  total +(\S+ \S+)", text, re.M)
    assert told == [in_units(max(totals))]
    if len(found) > 1:
        table = text.split("Memory of each pipeline rank\n")[1].split("\n\n")[0].splitlines()[1:]
        assert all(row.endswith(in_units(n)) for row, n in zip(table, totals, strict=True))
    schedule = schedule_of(config, few_micro_batches(config))
    for rank, step in enumerate(steps):
        pairs = {schedule.ranks[rank][n] for n in schedule.overlapped_forwards(rank)}
        order = [a for a in schedule.ranks[rank] if a.kind != "W" or schedule.split]
        drawn = [moment.action for moment in step if isinstance(moment.action, Action)]
        assert drawn == [action for action in order if action not in pairs]
        assert [moment.action for moment in step[-2:]] == ["sums of gradients", "update"]


LONG = [
    ("--zero-stage 1 --num-layers 30", 8, "1f1b", 1, 24),
    ("--zero-stage 2 --overlap-grad-reduce --num-layers 22", 8, "interleaved", 2, 16),
    ("--zero-stage 3 --overlap-param-gather --num-layers 21", 6, "interleaved", 3, 12),
    ("--zero-stage 2 --recompute-granularity full --num-layers 22", 8, "zb-v", 2, 24),
    ("--fused-linear-cross-entropy --num-layers 47", 8, "v-half", 2, 8),
    ("--zero-stage 1 --cpu-offload-activations --num-layers 24", 6, "zb-h1", 1, 18),
    ("--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
     "--overlap-moe-expert-parallel-comm --num-layers 30", 6, "interleaved", 2, 18),
]  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("more, size, schedule, v, count", LONG)
def test_ranks_that_are_recorded_once_have_the_bytes_that_each_has(more, size, schedule, v, count):
    """In each action, and in host memory; copies, collectives and messages too. The norm's index,
    of all blocks of the model, is the shorter pipeline's, and so are the few bytes that all of its
    ranks gather.
    """
    flags = f"{more} --pipeline-model-parallel-size {size} --pipeline-schedule {schedule}"
    flags += f" --num-virtual-stages-per-pipeline-rank {v} --global-batch-size {count * 2}"
    config = read(f"{flags} --micro-batch-size 1 --vocab-size 64 --device cuda", 2 * size)
    every, found = record(config, pretrain_llama), recordings_of(config, pretrain_llama)
    assert len({id(each.run) for each in found}) < size
    for rank, one in enumerate(found):
        other = every[rank]
        mine, its = step_memory(config, one), step_memory(config, other)
        assert [moment.action for moment in mine] == [moment.action for moment in its], rank
        for here, there in zip(mine, its, strict=True):
            assert here.total == pytest.approx(there.total, rel=2e-3), (rank, here.action)
        assert one.most(HOST) == other.most(HOST) and one.copied() == other.copied()
        sent = [
            sorted((row.axis, row.verb, row.who, row.purpose, row.times, row.bytes)
                   for row in traffic_rows(each)
                   if row.verb != "receive" and (row.axis != "pp" or row.purpose not in SMALL))
            for each in (one, other)
        ]  # fmt: skip
        assert sent[0] == sent[1], rank


@pytest.mark.parametrize(
    "schedule, chunks", sampled([("interleaved", 2), ("1f1b", 1), ("gpipe", 1)], 3)
)
def test_what_is_stored_follows_the_schedule(schedule, chunks):
    """Of middle ranks, whose stages are alike: as many micro-batches as the timeline has. Of each
    the stage's layers, without the input of the first, which is a message.
    """
    more = f"{PIPELINE} --global-batch-size 8 --pipeline-schedule {schedule}"
    more += " --num-virtual-stages-per-pipeline-rank 2" * (chunks > 1)
    config = read(more, 4)
    found = record(config, pretrain_llama, (1, 2))
    plan = schedule_of(config, found[1].few)
    cost = [1.0] * plan.stages
    ranks = rows(simulate(plan, Costs(cost, cost, cost)).timeline, plan)
    one = 8 // plan.stages * layer_bytes(config) - 32 * 64 * 4
    tables = 32 * 8 * 4
    for rank in (1, 2):
        assert not any(
            stage.embedding or stage.loss
            for stage in rank_stages(config, pretrain_llama.model_provider, rank)
        )
        moments = {each.action: each.kinds for each in found[rank].moments()}
        before = 0
        for box, now in zip(ranks[rank], in_flight(ranks[rank])[1:], strict=True):
            kind, chunk, i = box.action
            # an F stores what it ends with; a B has what it begins with, of its own stage a part
            stored = moments[Action(kind[0], chunk, i)][ACTIVATIONS] - tables
            if kind == "F":
                assert is_few(stored - now.for_b * one), (box.action, stored)
            else:
                assert (before - 1) * one < stored <= before * one, (box.action, stored)
            before = now.for_b


def test_fewer_micro_batches_than_the_step_has_are_named_as_such():
    """They are numbered from 0 on, so the last one drawn is not the last one of the step."""
    about = memory_picture.drawn_of(read(f"{PIPELINE} --global-batch-size 64", 4), pretrain_llama)
    names = [name for name, _ in about["steps"]]
    drawn = 1 + max(int(name[1:]) for name in names if name[0] in "FB")
    assert drawn < 64 and f"drawn with {drawn} micro-batches for 64: more" in about["subtitle"]


@pytest.mark.prove
def test_few_micro_batches_have_the_memory_of_all_where_an_f_is_beside_a_b():
    """Each kind of pair has its own bytes: the chunk of the F, and that of the B."""
    more = "--num-layers 4 --global-batch-size 32 --micro-batch-size 1 --vocab-size 16 --bf16"
    more += " --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    more += " --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    more += " --overlap-moe-expert-parallel-comm --zero-stage 2 --seq-length 128"
    config = read(more, 4)
    for rank in (0, 1):
        few, every = (record(config, pretrain_llama, [rank], n)[rank] for n in (0, 16))
        assert few.few < every.few == 16
        assert dry_run.memory(config, few) == dry_run.memory(config, every)


def test_ranks_follow_one_that_has_other_pairs_of_an_f_and_a_b():
    """The chunks of a pair depend on the rank: the nearest one stands for one that is not there."""
    whole, recorded = (build("interleaved", 4, m, 4, overlaps=True) for m in (32, 12))
    every = [[turn.name for _, turn in turns(steps, False)] for steps in plan(recorded)]
    for rank, order in enumerate(followed(whole, recorded, (0, 1, 1, 3))):
        names = every[1 if rank == 2 else rank]
        own = turns(plan(whole)[rank], False)
        assert len(order) == len(own)
        for place, (action, turn) in zip(order, own, strict=True):
            name = names[place.like]
            assert place.action == action and name[:2] == turn.name[:2]
            assert (name[2] == ALONE) == (turn.name[2] == ALONE)
            assert name == turn.name or turn.name not in names


@pytest.mark.parametrize("more, size", [
    ("--zero-stage 1 --num-layers 13 --pipeline-model-parallel-size 2 "
     "--num-virtual-stages-per-pipeline-rank 2", 2),
    pytest.param(
        "--zero-stage 3 --overlap-param-gather --overlap-grad-reduce --num-layers 7", 1,
        marks=pytest.mark.prove,
    ),
    ("--zero-stage 3 --overlap-param-gather --overlap-grad-reduce --zero-reduce-each-microbatch "
     "--num-layers 9 --bf16", 1),
    pytest.param(
        "--zero-stage 2 --pipeline-model-parallel-size 4 --pipeline-schedule zb-v --num-layers 33 "
        "--recompute-granularity full", 4, marks=pytest.mark.prove,
    ),
    pytest.param(
        "--zero-stage 1 --pipeline-model-parallel-size 4 --num-layers 34 "
        "--num-virtual-stages-per-pipeline-rank 2 --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --bf16", 4,
        marks=pytest.mark.prove,
    ),
])  # fmt: skip
def test_stages_of_few_layers_have_the_bytes_of_many(more, size):
    """A rank whose chunks differ by a layer too. Buckets are of less than a layer."""
    flags = f"{more} --micro-batch-size 1 --vocab-size 64 --device cuda --ddp-bucket-size 4096"
    config = read(f"{flags} --global-batch-size {32 * size}", 2 * size)
    few, every = (recordings_of(config, pretrain_llama, n) for n in (few_layers(config), None))
    near = 5e-3 if "--overlap-moe" in more else 1e-3  # a rank's pairs stand for another's
    for rank, (one, other) in enumerate(zip(few, every, strict=True)):
        mine, its = step_memory(config, one), step_memory(config, other)
        assert [moment.action for moment in mine] == [moment.action for moment in its], rank
        for here, there in zip(mine, its, strict=True):
            assert here.total == pytest.approx(there.total, rel=near), (rank, here.action)


def bars(svg):
    """Return {action: {kind: height}} of a picture's bars, in its own units."""
    found = {}
    for group in ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}g"):
        if match := re.fullmatch(r"(.+)-([FBW][\d.]+|sums|update)", group.get("id", "")):
            (path,) = group.iter("{http://www.w3.org/2000/svg}path")
            ys = [float(y) for y in re.findall(r"[-\d.]+ ([-\d.]+)", path.get("d"))]
            found.setdefault(match[2], {})[match[1]] = max(ys) - min(ys)
    return found


def draw(path, more, world=8):
    """Return the exit code of a dry run of the model that draws its memory."""
    words = f"--mock-data --vocab-size 32768 --dry-run --memory-picture {path} {more}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        return pretrain_llama.main([*MODEL, *words.split(), "--num-layers", "4"])


@pytest.mark.prove
def test_the_picture_shows_the_step_with_its_peak_marked(tmp_path, capsys):
    svg = tmp_path / "memory.svg"
    flags = "--pipeline-model-parallel-size 4 --zero-stage 2 --global-batch-size 16"
    assert draw(svg, flags) == 0
    out = capsys.readouterr().out
    (told,) = re.findall(r"^  total +(\S+ \S+)", out, re.M)
    words = svg.read_text()
    assert f"peak {told}, B, micro-batch" in words and "Pipeline rank 0 of 4 (1f1b)" in words
    assert out.endswith(f"drawn: {svg}\n")
    config = parse([*MODEL, *flags.split(), "--num-layers", "4", "--dry-run",
                    "--memory-picture", str(svg)], 8)  # fmt: skip
    steps = memory_picture.drawn_of(config, pretrain_llama)["steps"]
    drawn = bars(svg)
    assert [*drawn] == [*dict.fromkeys(drawn)] and {*drawn} == {name for name, _ in steps}
    heights = {name: sum(drawn[name].values()) for name, _ in steps}
    unit = max(heights.values()) / max(sum(kinds.values()) for _, kinds in steps)
    for name, kinds in steps:
        assert heights[name] == pytest.approx(unit * sum(kinds.values()), rel=1e-3)
        weights = kinds["parameters"] + kinds["gathered weights"]
        assert drawn[name]["weights"] == pytest.approx(unit * weights, rel=1e-3)
    assert draw(svg, flags) == 0  # over its own picture


@pytest.mark.prove
def test_the_picture_of_the_documents_is_what_is_drawn_now(tmp_path):
    """docs/memory.md has the command that draws it again."""
    script = ["bash", "examples/llama3_70b_16_nodes.slurm", "--dry-run"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WORLD_", "RANK"))}
    script += ["--memory-picture", str(tmp_path / "a.svg")]  # in a process of its own
    env = kept | {"WORLD_SIZE": "128", "LAUNCH": sys.executable}
    subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert shapes(tmp_path / "a.svg") == shapes(ROOT / "docs" / "memory.svg")


def test_what_cannot_be_drawn_is_one_sentence(tmp_path, capsys):
    mine = tmp_path / "mine.svg"
    mine.write_text("<svg>drawn by somebody</svg>")
    for path, more, said in (
        (mine, "", f"--memory-picture {mine}: it exists and is not a picture that matplotlib drew"),
        (tmp_path / "a.pdf", "", "a.pdf: a picture must be a .png or .svg file"),
    ):
        assert draw(path, f"--global-batch-size 8 {more}") == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert mine.read_text() == "<svg>drawn by somebody</svg>" and len([*tmp_path.iterdir()]) == 1
    words = [*MODEL, "--num-layers", "4", "--global-batch-size", "8", "--device", "cpu"]
    with pytest.raises(ValueError, match="--memory-picture a.svg needs --dry-run"):
        parse([*words, "--memory-picture", "a.svg"], 8)
