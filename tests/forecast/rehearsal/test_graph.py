# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal says of CUDA graphs: it passes steps that repeat, and names what does not."""

from types import SimpleNamespace

import pytest

from forecast.rehearsal.events import Action, Alloc, Free, HostWait, Launch, Where
from forecast.rehearsal.graph import prove

UNTIED = "--cuda-graph --untie-embeddings-and-output-weights"


@pytest.mark.prove
@pytest.mark.parametrize("world,flags,graphs,compared", [
    (1, f"{UNTIED} --global-batch-size 4 --rehearse-steps 3", 4, 3),
    (2, f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel "
        "--global-batch-size 4 --recompute-granularity full", 4, 2),
    (2, f"{UNTIED} --zero-stage 1 --overlap-grad-reduce --overlap-param-gather "
        "--global-batch-size 10", 3, 2),
    (1, f"{UNTIED} --global-batch-size 4 --fp8-format hybrid --fp8-recipe tensorwise", 4, 2),
])  # fmt: skip
def test_steps_that_repeat_pass(rehearse, world, flags, graphs, compared):
    found = rehearse(flags, world)
    assert found.code == 0, found.text
    said = found.report["cuda_graph"]
    assert (said["graphs"], said["compared"]) == (graphs, compared)
    rows = sum(row["count"] for row in found.report["launches"])
    assert said["calls"] == rows + len(found.report["collectives"])
    assert "CUDA graphs" in found.text


def launch(op="aten::mm", read=(), written=()):
    return Launch(op, 0, ((2, 2),), "bfloat16", read, written, bytes=8, flops=1.0, where=Where())


def micro_batch(i, base, weight=1, batch=2, *more):
    """Multiply a micro-batch's input by a weight into a tensor of its own, then free that."""
    words = f"F chunk 0 micro-batch {i} in stage 0 of iteration 2"
    made = Alloc(base, 64, "", 0, "cuda", Where("forward", "", "linear", "mpu/layers/linear.py:1"))
    return [Action(words), made, launch(read=(weight, batch), written=(base,)), *more,
            Action(words.replace("F ", "BW ")), launch(read=(base,), written=(weight,)),
            Free(base, "")]  # fmt: skip


def found(*parts, **overlap):
    """Return what is said of a step of these micro-batches. Storages 2 to 9 are of batches."""
    begin = Action("iteration 2")
    events = [begin, *(event for part in parts for event in part), Action("the update")]
    born = {number: "training/data/batch.py:9" for number in range(2, 10)}
    recorder = SimpleNamespace(events=events, born=born)
    parallel = SimpleNamespace(overlap_grad_reduce=False, overlap_param_gather=False, shard_size=1)
    vars(parallel).update(overlap)
    return prove(recorder, [], recorder.events, parallel)


def test_inputs_and_own_memory_may_differ():
    said = found(micro_batch(0, 20), micro_batch(1, 21, 1, 3), micro_batch(2, 22, 1, 4))
    assert not said.findings and (said.calls, said.outside, said.compared) == (6, 0, 1)


WAIT = HostWait(-1, 0, "aten::item", Where("forward", "", "glue", "mpu/layers/rope.py:7"))
BROKEN = {
    "the host waits": (micro_batch(2, 22, 1, 4, WAIT), "the host waits in micro-batch 2"),
    "other memory": (micro_batch(2, 22, 11, 4), "micro-batches 1 and 2 use other memory"),
    "what another one made": (
        micro_batch(2, 22, 1, 4, launch("aten::add", read=(21,))), "then aten::add",
    ),
    "a launch more": (micro_batch(2, 22, 1, 4, launch("aten::add")), "then aten::add"),
    "memory of another size": (
        [e._replace(bytes=65) if isinstance(e, Alloc) else e for e in micro_batch(2, 22, 1, 4)],
        "memory of 64 bytes, then memory of 65 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_graph_cannot_hold_is_named(what):
    last, words = BROKEN[what]
    said = found(micro_batch(0, 20), micro_batch(1, 21, 1, 3), last)
    assert len(said.findings) == 1 and words in said.findings[0].what
    assert said.findings[0].kind == "graph"


def test_an_eager_micro_batch_may_differ():
    last = micro_batch(2, 22, 1, 4, launch("c10d::reduce_scatter"))
    said = found(micro_batch(0, 20), micro_batch(1, 21, 1, 3), last, overlap_grad_reduce=True)
    assert not said.findings and (said.graphs, said.outside) == (2, 3)
