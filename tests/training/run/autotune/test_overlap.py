# SPDX-License-Identifier: Apache-2.0
"""--tp-comm-overlap: which method is chosen, why and from where, and that it is all printed."""

import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import pretrain_llama
from mpu import connect
from mpu.comm import workspace
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.overlap.choices import OverlapMap
from tests.model.twin import config_of, micro_batches
from tests.training.small_llama import read as parsed
from training.checkpoint import find_latest
from training.faults.monitor import FailureMonitor
from training.run.autotune import overlap
from training.settings.config import UsageError

TP = "--tensor-model-parallel-size 2"
KEYS = ["gather 4x8 -> 6 float32", "scatter 4x6 -> 8 float32"]


@pytest.mark.parametrize(
    "more, mode",
    [
        ("", "none"),
        ("--tp-comm-overlap", "auto"),
        ("--tp-comm-overlap ring", "ring"),
        ("--tp-comm-overlap=symmetric", "symmetric"),
        ("--tp-comm-overlap none", "none"),
    ],
)
def test_the_flag_bare_is_auto(more, mode):
    assert parsed(f"{TP} --sequence-parallel {more}", 2).parallel.tp_comm_overlap == mode


def test_what_the_flag_needs():
    with pytest.raises(UsageError, match="--tp-comm-overlap ring needs --sequence-parallel"):
        parsed(f"{TP} --tp-comm-overlap ring", 2)
    config = parsed("--tp-comm-overlap --sequence-parallel", 2)  # at tp 1, as --sequence-parallel
    assert config.parallel.tp_comm_overlap == "none"
    assert any("--tp-comm-overlap auto is off: at --tensor" in note for note in config.notes)
    auto = f"{TP} --sequence-parallel --deterministic-mode --tp-comm-overlap"
    for method, count in (("", 1), ("auto", 1), ("ring", 0)):
        notes = parsed(f"{auto} {method}", 2).notes
        assert sum("auto may choose differently in another run" in n for n in notes) == count


def test_on_gpus_symmetric_is_not_for_a_pipeline():
    pipeline = f"{TP} --sequence-parallel --pipeline-model-parallel-size 2 --tp-comm-overlap"
    said = "--tp-comm-overlap symmetric with --pipeline-model-parallel-size 2 needs --device cpu"
    with pytest.raises(UsageError, match=said):
        parsed(f"{pipeline} symmetric --device cuda --dry-run", 4)
    for words in ("auto --device cuda --dry-run", "symmetric --device cpu", "ring --dry-run"):
        assert parsed(f"{pipeline} {words}", 4).parallel.tp_comm_overlap == words.split()[0]


@pytest.mark.parametrize(
    "megatrons, said",
    [
        ("--tp-comm-overlap-cfg x.yaml", "--tp-comm-overlap auto measures each projection"),
        ("--disable-tp-comm-bulk-wgrad", "--tp-comm-overlap auto overlaps those that gain time"),
        ("--no-tp-comm-split-ag", "--tp-comm-overlap auto overlaps those that gain time"),
    ],
)
def test_megatrons_switches_are_accepted_with_a_word(megatrons, said):
    assert any(said in note for note in parsed(megatrons, 1).notes)


class Two(torch.nn.Module):
    """A column and a row layer, twice: layers.0 and layers.1."""

    def __init__(self, ctx):
        super().__init__()

        def pair():
            return torch.nn.ModuleDict(
                {
                    "up": ColumnParallelLinear(8, 12, ctx=ctx),
                    "down": RowParallelLinear(12, 8, ctx=ctx),
                }
            )

        self.layers = torch.nn.ModuleList([pair(), pair()])


def settled(comm, mode, memory, saved=None):
    """Settle on one rank, with made-up times; return paths, what was said and how often tuned."""
    grid = comm.grid(2, memory=memory)
    ctx = LayerContext(grid, True, sink=GradientSink(torch.float32))
    p = SimpleNamespace(tp_comm_overlap=mode, no_shared_memory=not memory)
    sizes = SimpleNamespace(seq_length=4), SimpleNamespace(micro_batch_size=2)
    config = SimpleNamespace(parallel=p, model=sizes[0], batch=sizes[1])
    said, tuned, kept = [], [], overlap.tune
    chosen = OverlapMap(mode)

    def tune(layers, paths, ctx):
        tuned.append(list(layers))
        spent = {"none": 4.0, "ring": 3.0, "symmetric": 2.0}
        return {key: {path: spent[path] for path in paths} for key in KEYS}

    overlap.tune = tune
    try:
        found = overlap.choose_methods(Two(ctx), ctx, config, said.append, saved)
        chosen = found.chosen
        assert not (found.auto and found.auto.unmeasured)
    finally:
        overlap.tune = kept
    return chosen.mode, chosen.choices, said, len(tuned)


def test_each_mode_says_one_line_a_projection(world):
    names = [f"layers.*.{n} {d}" for n in ("up", "down") for d in ("forward", "backward")]
    for mode in ("ring", "symmetric", "auto"):
        results = world(2).run(settled, mode, True)
        assert results[0] == results[1]
        taken, choices, said, tuned = results[0]
        lines = said[-4:]
        assert taken == mode and tuned == (mode == "auto") and len(said) == 4 + tuned
        for name, line in zip(names, lines, strict=True):
            assert line.startswith(f"overlap: {name} (") and "4x" in line
            path = "symmetric" if mode == "auto" else mode
            assert f": {path}, " in line
            gain = "50% less time expected: none 4e+03 ms, ring 3e+03 ms, symmetric 2e+03 ms"
            assert (gain if mode == "auto" else "as asked for") in line
        assert choices == (dict.fromkeys(KEYS, "symmetric") if mode == "auto" else {})


def test_what_does_not_pay_or_cannot_be_had_is_said_with_the_reason(world):
    ((mode, _, said, _), _) = world(2).run(settled, "symmetric", False)
    assert mode == "ring"
    assert all("ring, as symmetric is not available: --no-shared-memory" in line for line in said)
    ((_, choices, said, _), _) = world(2).run(settled, "auto", False)
    assert set(choices.values()) == {"ring"}
    assert "overlap: symmetric is not available: --no-shared-memory" in said
    assert "symmetric 2" not in said[-1]
    ((_, _, said, _), _) = world(2).run(settled, "none", True)
    assert said == ["communication overlap: off (--tp-comm-overlap turns it on)"]


def test_a_checkpoints_choices_are_replayed_where_they_fit(world):
    saved = dict(zip(KEYS, ("ring", "none"), strict=True))
    ((_, choices, said, tuned), _) = world(2).run(settled, "auto", True, saved)
    assert choices == saved and not tuned
    assert said[0] == "overlap: as in the checkpoint"
    assert said[1].endswith("ring, as recorded") and said[2].endswith("none, as recorded")
    other = {"gather 3x8 -> 6 float32": "ring"}
    ((_, choices, said, tuned), _) = world(2).run(settled, "auto", True, other)
    assert tuned == 1 and choices.keys() == set(KEYS)
    assert f"the choices of the checkpoint cannot be used: it has none for {KEYS[0]}" in said[0]


def a_step_of_what_was_listed(comm):
    """Take steps with every listed matmul chosen, then with other micro-batches."""
    case = dict(tp=2, dp=1, sp=True, recompute=None, tied=True, m=3, path="auto", layers=1)
    config = config_of(case)
    run = pretrain_llama.build(
        config, comm.grid(2, memory=True), torch.device("cpu"), FailureMonitor()
    )
    choices, b = {}, config.batch.micro_batch_size
    for p in overlap.projections(run.model, b * config.model.seq_length).values():
        choices |= {p.forward: "symmetric", p.backward: "ring"}
    plan = overlap.Overlap(OverlapMap("auto", choices), run.model)
    lines, counts = [], []
    notes = overlap.OverlapNotes(plan.auto, SimpleNamespace(note=lines.append))
    pretrain_llama.train_step(run, micro_batches(case, 0), 0.0)
    notes.after_step(None)
    counts.append(len(lines))
    pretrain_llama.train_step(run, micro_batches(case | {"m": 1}, 0), 0.0)
    for _ in range(2):
        notes.after_step(None)
        counts.append(len(lines))
    return lines, counts


def test_every_matmul_of_a_step_was_listed_and_others_are_told_once(world):
    for lines, counts in world(2).run(a_step_of_what_was_listed):
        assert counts == [0, 10, 10]
        assert all("overlap: " in line for line in lines)


def without_memory(comm):
    """Share memory where there is none to be had; return the reason that the lines then give."""
    grid = copy.copy(comm.grid(2))

    def refuse(*args):
        raise workspace.Unavailable("the hosts differ")

    inner, workspace.Workspace._allocate = workspace.Workspace._allocate, refuse
    try:
        connect.share(grid, timedelta(seconds=10))
    finally:
        workspace.Workspace._allocate = inner
    config = SimpleNamespace(parallel=SimpleNamespace(no_shared_memory=False))
    return overlap._why_not(LayerContext(grid, True), config)


def test_the_reason_why_ranks_share_no_memory_arrives(world):
    assert world(2).run(without_memory) == ["the hosts differ"] * 2


FLAGS = """
    --mock-data --vocab-size 97 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --num-workers 0 --device cpu --lr 1e-2 --log-interval 1 --global-batch-size 4
    --micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel
"""


NAMES = [f"layers.*.{n}" for n in ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")]


def run(launcher, words, ranks=2):
    """Run; return the result, and the lines of overlap without what they measured."""
    result = launcher.run(ranks, f"{FLAGS} {words}".split())
    assert result.codes == [0] * ranks, result.said(0)
    assert not [line for r in range(1, ranks) for line in result.said(r, "out").splitlines()]
    lines = [line for line in result.said(0, "out").splitlines() if line.startswith("overlap: ")]
    return result, lines


def check_follows(result, other):
    for mine, theirs in zip(result.rows(), other.rows()[-len(result.rows()) :], strict=True):
        assert mine["iteration"] == theirs["iteration"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.prove
def test_a_run_with_auto_follows_none_and_a_resumed_one_replays(launcher):
    plain, _ = run(launcher, "--train-iters 4")
    auto = "--train-iters 4 --tp-comm-overlap"
    first, lines = run(launcher, f"{auto} --save {{dir}}/saved --save-interval 2")
    openings = [line.split(" (")[0] for line in lines]
    ways = [f"overlap: {n} {d}" for n in (*NAMES, "head") for d in ("forward", "backward")]
    assert openings == ["overlap: measuring", *ways]
    assert all("none " in line and " ms" in line and "%" in line for line in lines[1:])
    check_follows(first, plain)
    again, lines = run(launcher, f"{auto} --load {first.folder}/saved --ckpt-step 2")
    assert lines[0] == "overlap: as in the checkpoint"
    assert all(line.endswith("as recorded") for line in lines[1:]) and len(lines) == 11
    assert again.losses() == first.losses()[2:]  # to the bit
    choices = find_latest(str(first.folder / "saved"), Grid()).state["tp_comm_overlap"]["choices"]
    for line in lines[1:]:
        key, _, path = line.partition(" (")[2].removesuffix(", as recorded").partition("): ")
        assert choices[key] == path
