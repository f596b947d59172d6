# SPDX-License-Identifier: Apache-2.0
"""A step at ZeRO levels 1 to 3 sends what forecast/traffic.py lists.

`make explain` shows what runs during each gather, and which gradients each sum leaves before.
"""

import re

import pytest

from tests.sampling import sampled
from tests.tools.test_explain import FULL, config_of, line_of, step_of
from tools.explain import explain, main

GROUPS = f"{FULL} --recompute-method uniform --recompute-num-layers 2"
EACH, BF16_WIRE = "--zero-reduce-each-microbatch", "--grad-reduce-in-bf16"
NARROW = "--bf16 --main-grads-dtype bf16"
TWO = "--dp 4 --num-distributed-optimizer-instances 2"
MUON = "--optimizer muon"
BLOCKING = "--overlap-param-gather false"
CASES = [
    "--dp 2 --zero 1 --micro-batches 2 --bf16",
    f"--dp 2 --zero 2 --micro-batches 2 {EACH}",
    "--dp 2 --zero 3 --micro-batches 2 --layers 3",
    f"--dp 2 --zero 3 --micro-batches 2 --tied {BLOCKING} --overlap-grad-reduce false",
    f"--dp 2 --tp 2 --zero 3 --micro-batches 2 {EACH}",
    "--dp 2 --pp 2 --zero 3 --schedule zb-v --layers 5",
    f"--dp 2 --tp 2 --zero 1 --bf16 {MUON}",
]
MORE = [
    *(f"--dp 2 --tp 2 --zero {zero} --micro-batches 2" for zero in (1, 2)),
    *(f"--dp 2 --pp 2 --zero {zero} --tied --micro-batches 3" for zero in (1, 2, 3)),
    *(f"{TWO} --zero {zero} --micro-batches 2" for zero in (1, 2, 3)),
    *(f"--dp 2 --zero {zero} {NARROW} {BF16_WIRE}" for zero in (1, 2, 3)),
    *(f"--dp 2 --tp 2 --zero {zero} {NARROW} {EACH}" for zero in (2, 3)),
    "--dp 2 --zero 3 --fp64",
    f"--dp 2 {BF16_WIRE} --micro-batches 2",
    f"{TWO} --zero 2 {BLOCKING} --micro-batches 3 {EACH}",
    f"--dp 2 --zero 1 {BLOCKING} --tied",
    "--dp 2 --zero 3 --layers 1 --tied --micro-batches 3",
    f"--dp 2 --zero 3 --layers 1 {BLOCKING}",
    "--dp 2 --zero 3 --layers 4 --tied --micro-batches 3",
    f"--dp 2 --zero 3 --layers 5 --micro-batches 2 {GROUPS}",
    f"--dp 2 --zero 3 --layers 4 --micro-batches 2 --tied {GROUPS}",
    f"--dp 2 --zero 3 --layers 4 {BLOCKING} {GROUPS}",
    f"--dp 2 --zero 3 --layers 3 {FULL}",
    "--dp 2 --zero 3 --layers 3 --overlap-grad-reduce false --micro-batches 2",
    "--dp 2 --tp 2 --zero 3 --layers 1 --tied --micro-batches 2",
    f"--dp 2 --tp 2 --zero 3 --tied {BLOCKING} --micro-batches 2",
    "--dp 2 --tp 2 --zero 3 --no-sequence-parallel --micro-batches 2",
    f"--dp 2 --tp 2 --zero 3 --tied --layers 3 {FULL}",
    "--dp 2 --pp 2 --zero 3 --schedule zb-v --tied",
    f"--dp 2 --pp 2 --zero 3 --schedule zb-h1 {BLOCKING} --overlap-grad-reduce false",
    f"--dp 2 --pp 2 --zero 3 --schedule interleaved --layers 5 {FULL}",
    "--dp 2 --pp 2 --zero 3 --bf16",
    "--dp 2 --pp 2 --zero 2 --schedule v-half",
    "--dp 2 --tp 2 --pp 2 --zero 3 --schedule interleaved --tied",
    "--dp 2 --tp 2 --pp 2 --zero 1 --schedule gpipe --tied --bf16",
    f"--pp 2 --zero 3 {TWO}",
    f"--dp 2 --tp 2 --zero 0 {MUON}",
    f"--dp 4 --zero 3 --layers 3 {MUON}",
    f"--dp 2 --pp 2 --zero 2 --schedule zb-h1 --tied {MUON}",
    f"{TWO} --zero 1 {MUON}",
]


def run(comm, words):
    """Explain a step on a rank of the world; every rank must count what the document says."""
    found = explain(*step_of(comm, words))
    assert found.counted == found.stated and found.equal and found.counted
    return found.text


def check(world, words):
    for text in world(config_of(words).parallel.world_size).run(run, words):
        assert text.endswith("All equal.") and "DIFFERS" not in text
        assert max(map(len, text.splitlines())) <= 150
        for before in re.findall(r"started by the update .*?\n---", text, re.DOTALL):
            assert " update  " in before and "send" not in before.partition("\n")[2].replace(
                "sends", ""
            )


@pytest.mark.parametrize("words", sampled(CASES[::-1], 3))
def test_worked_out_is_what_is_sent(world, words):
    check(world, words)


@pytest.mark.prove
@pytest.mark.parametrize("words", MORE)
def test_worked_out_is_what_is_sent_in_more_layouts(world, words):
    check(world, words)


def explained(world, words):
    """Return rank 0's story: of each collective its line, and what is said of it."""
    text = world(2).run(run, f"--dp 2 {words}")[0]
    parts = re.split(r"\n(?= ..  \w| {5}update )", text)
    return text, [" ".join(part.partition("\n\n")[0].split()) for part in parts[1:]]


def test_a_reader_sees_what_each_sum_leaves_before(world):
    text, events = explained(world, "--zero 2")
    sums = [event for event in events if "reduce_scatter" in event]
    assert len(sums) == 5 and "bucket 0: head; 32,768 numbers, rank 0 of 2 owns [0, 16,384)" in text
    head = line_of("mpu/layers/linear.py", "sink.register_grad_ready(self.weight)")
    assert (
        f"when a gradient of head ({head}) is done, before any gradient of bucket 1" in sums[0]
    )
    for i, event in enumerate(sums[:-1]):
        assert (
            f"grad sum bucket {i} " in event and f"before any gradient of bucket {i + 1}" in event
        )
        assert "hidden under" in event and "nothing ran" not in event
    assert "before" not in sums[-1]


def test_a_reader_sees_new_weights_wait_for_their_use(world):
    text, events = explained(world, "--zero 1")
    gathers = [event for event in events if event.startswith("update")]
    begin, first = text.index("started by the update"), text.index("BW chunk 0")
    assert begin < text.index("  update ") < first, "they come before the first micro-batch"
    assert [re.search(r"bucket (\d)", event)[1] for event in gathers] == list("43210")
    assert "waited for at embedding (mpu/layers/embedding.py:" in gathers[0]
    assert "waited for at head (mpu/layers/linear.py:" in gathers[-1]
    assert "matmul of layers.0.attention.qkv to matmul of layers.1.mlp.down" in gathers[-1]
    after = [event for event in events if re.match(r"\d+ update", event)]
    assert len(after) == 5 and all("not done at the end" in event for event in after)


@pytest.mark.prove
def test_a_reader_sees_a_block_gathered_under_the_one_before(world):
    text, events = explained(world, "--zero 3 --layers 3")
    gathers = [event for event in events if "gather bucket" in event]
    order = [re.search(r"bucket (\d)", event)[1] for event in gathers]
    assert order == list("4321023"), "to the head and back; bucket 1 stays whole at the turn"
    assert "the 6 weights of layers.1, requested by layers.0.attention_norm" in gathers[2]
    assert "gathered at the same time: bucket 3 waited for at layers.1.attention_norm" in gathers[2]
    assert gathers[2].endswith("matmul of layers.0.attention.qkv to matmul of layers.0.mlp.down")
    assert "requested by layers.1.mlp.down" in gathers[-1]
    assert all(event.count("gathered at the same time") == 1 for event in gathers)
    assert "bucket 1: the 6 weights of layers.2; 45,056 numbers, rank 0 of 2 owns" in text
    _, events = explained(world, f"--zero 3 --layers 3 {BLOCKING}")
    gathers = [event for event in events if "gather bucket" in event]
    assert len(gathers) == 2 * 3 + 2 and all(" blocks " in event for event in gathers)
    assert all("gathered at the same time: nothing" in event for event in gathers)


@pytest.mark.prove
def test_the_command(capsys):
    assert main(["--dp", "2", "--layers", "1", "--zero", "3"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 3. This is the second step" in out and out.endswith("All equal.\n")
