# SPDX-License-Identifier: Apache-2.0
"""State that is away between steps, on the device without memory: peak, copies, and mistakes."""

import pytest

import pretrain_llama
from forecast.dry_run import memory
from forecast.recording import record
from tests.forecast.rehearsal.conftest import SMALL, Process
from training.flags.parse import parse

FLAG = "--optimizer-state-offload "
WIDE = "--seq-length 128 --micro-batch-size 2 --vocab-size 500 --hidden-size 128 "
ZERO = "--overlap-grad-reduce --overlap-param-gather --global-batch-size 8 --zero-stage "
LAYOUTS = [  # world, flags
    (1, "--global-batch-size 8"),
    (2, ZERO + "1"),
    (2, ZERO + "1 --optimizer muon"),
    (2, ZERO + "2 --zero-reduce-each-microbatch"),
    (2, ZERO + "3 --optimizer muon"),
    (4, ZERO + "1 --tensor-model-parallel-size 2 --sequence-parallel --main-grads-dtype bf16"),
]
PIPELINE = (4, ZERO + "1 --pipeline-model-parallel-size 2 --micro-batch-size 1")


def told(world: int, flags: str):
    """Return what the dry run says: the peak, and the bytes that go down and come up."""
    config = parse([*SMALL, *flags.split(), "--dry-run"], world)
    recording = record(config, pretrain_llama, [0])[0]
    return sum(memory(config, recording).values()), recording.copied()


def check(rehearse, world: int, flags: str, within: float) -> int:
    code, report, text = rehearse(WIDE + flags, world)
    assert (report["findings"], code) == ([], 0), text
    peak, moved = told(world, WIDE + flags)
    counted = report["memory"]["peak_bytes"]
    assert abs(peak - counted) <= within * counted, (peak, counted)
    bytes_of = {
        way: sum(
            row["bytes"]
            for row in report["launches"]
            if row["op"].endswith(way) and row["part"] == "state"
        )
        for way in ("DtoH", "HtoD")
    }
    assert (bytes_of["DtoH"], bytes_of["HtoD"]) == moved
    return int(counted)


@pytest.mark.prove
@pytest.mark.parametrize("world, flags", LAYOUTS[1:2])
def test_its_peak_and_copies_are_those_of_the_dry_run(rehearse, world, flags):
    assert check(rehearse, world, FLAG + flags, 0.02) < check(rehearse, world, flags, 0.02)


@pytest.mark.prove
@pytest.mark.parametrize("world, flags", [*LAYOUTS, PIPELINE])
def test_its_peak_and_copies_on_every_layout(rehearse, world, flags):
    check(rehearse, world, FLAG + flags, 0.02)


FORK = """
from model.llama import *
from model.llama import hf_names, parameter_group
from mpu.optim import state_offload as so

{mistake}
"""
MISTAKES = {  # what is broken, and what the rehearsal says of it
    "an update does not wait for state on its way up": (
        """
def arrive(self):
    self.fetch()
    self.at = so.At.DEVICE
so.BucketState.arrive = arrive
""",
        "without a wait",
    ),
    "memory is freed while a copy reads it": (
        """
def leave(self):
    if self.at == so.At.DOWN:
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        self.at = so.At.HOST
so.BucketState.leave = leave
""",
        "is freed for the stream that allocated it",
    ),
    "state goes down before its update": (
        """
def send(self):
    assert self.at == so.At.DEVICE
    with so.torch.cuda.stream(self._down):
        for to, own in zip(self.home, self.flats):
            to.copy_(own, non_blocking=True)
    self._over = self._down.record_event()
    self.at = so.At.DOWN
so.BucketState.send = send
""",
        "without a wait",
    ),
    "copies are on the stream that computes": (
        """
made = so.BucketState.__init__
def alone(self, flats, host, streams):
    made(self, flats, host, (None, None))
so.BucketState.__init__ = alone
""",
        "on the compute stream",
    ),
}


@pytest.mark.prove
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_its_order_is_found(tmp_path, what):
    mistake, said = MISTAKES[what]
    fork = tmp_path / "fork.py"
    fork.write_text(FORK.format(mistake=mistake))
    process = Process(tmp_path / "report.json")
    flags = f"{FLAG}{LAYOUTS[1][1]} --model-file {fork}"
    code, report, text = process.rehearse([*SMALL, *flags.split()], 2)
    process.close()
    assert code == 1 and any(said in found["what"] for found in report["findings"]), text
