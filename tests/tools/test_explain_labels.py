# SPDX-License-Identifier: Apache-2.0
"""A collective's label says whose it is; `make explain` reads no names of local variables."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import pretrain_llama
from forecast.recording import Actions
from forecast.rehearsal.run import loader
from mpu.comm.transport import Label
from mpu.pipeline.engine import Payload
from tests.sampling import sampled
from tests.tools.test_explain import config_of, step_of
from training.run.stop import Agreement

ROOT = Path(__file__).resolve().parents[2]
PHASES = {"forward", "backward", "wgrad", "grad sum", "gather", "norm", "update"}
STRINGS = {
    ("cross_entropy", "forward"), ("train_step", "loss sum"), ("optimizer", "norm"),
    ("agreement", "go on?"),
}  # fmt: skip
# flags of tools/explain.py, kinds of labels that must be there. Those are no sets: their order in a
# test's name depends on whether a process compiled this file or read its bytecode.
LAYOUTS = [
    ("--tp 2", ["layer forward", "layer backward", "cross_entropy forward"]),
    ("--tp 2 --tp-comm-overlap ring", ["layer forward", "layer backward"]),
    ("--tp 2 --no-sequence-parallel", ["layer forward", "layer backward"]),
    ("--tp 2 --dp 2", ["bucket grad sum", "optimizer norm", "train_step loss sum"]),
    ("--dp 2 --zero 1 --micro-batches 2", ["bucket grad sum", "bucket update"]),
    (
        "--dp 2 --zero 2 --micro-batches 2 --zero-reduce-each-microbatch",
        ["bucket grad sum", "bucket update"],
    ),
    ("--tp 2 --dp 2 --zero 3", ["bucket grad sum", "bucket gather", "bucket update"]),
    ("--tp 2 --pp 2 --schedule zb-h1 --tied", ["payload forward", "layer wgrad"]),
    ("--dp 2 --pp 2 --zero 3 --schedule zb-v", ["payload backward", "bucket gather"]),
]


class Strict:
    """A trace that refuses a collective without a label, between `begin` and the end."""

    def __init__(self) -> None:
        self.strict, self.labels = False, []

    def issued(self, verb, axis, tensor, sent, is_async, label=None):
        if self.strict:
            assert isinstance(label, Label), f"{verb} over {axis.name} of {list(tensor.shape)}"
            self.labels.append(label)
        return self

    def waiting(self) -> None:
        """Hear of a wait that begins."""

    def waited(self) -> None:
        """Hear of a wait that is over."""


def kind(label, run) -> str:
    """Name a label; fail where it does not say whose the collective is."""
    who, phase = label
    if isinstance(who, str):
        assert (who, phase) in STRINGS, label
        return f"{who} {phase}"
    assert phase in PHASES, label
    if isinstance(who, nn.Module):
        assert any(who is module for module in run.model.modules())
        return f"layer {phase}"
    if isinstance(who, Payload):
        assert phase == {"F": "forward", "B": "backward"}[who.kind], label
        return f"payload {phase}"
    assert any(who is bucket for bucket in run.sink.buckets), label
    return f"bucket {phase}"


def kinds_of_two_steps(comm, words):
    (config, grid), trace = step_of(comm, words), Strict()
    grid.traced(trace)
    try:
        run = pretrain_llama.build(config, grid, torch.device("cpu"), Actions(lambda words: None))
        batches = loader(config, grid).next_global_batch(0, config.batch.global_batch_size)
        trace.strict, agreement = True, Agreement(grid.world)
        for _ in range(2):
            found_inf = pretrain_llama.train_step(run, batches, 1e-3)[2]
            agreement.ask(False, False, found_inf)
            run.iteration += 1
        agreement.close()
    finally:
        grid.traced(None)
    return dict(Counter(kind(label, run) for label in trace.labels))


@pytest.mark.parametrize("words, expected", sampled(LAYOUTS, 2), ids=str)
def test_every_collective_of_a_step_has_a_label(world, words, expected):
    results = world(config_of(words).parallel.world_size).run(kinds_of_two_steps, words)
    found = set().union(*results)
    assert {*expected, "agreement go on?"} <= found, found


def test_no_local_variable_is_read():
    """Frames are walked for files and line numbers, and locals are nobody's business."""
    for folder in ("tools", "mpu", "model", "training"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            reports = file.name in ("activity.py", "load.py")  # which functions were called
            names = "co_name" in source and not reports
            assert "f_locals" not in source and not names, file
