# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in the record of a rehearsed rank: what would fail, wait or be wrong on a GPU."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.rehearsal import expert_rules
from tools.rehearsal.events import HostWait, Launch, Transfer
from tools.rehearsal.kernels_of_cuda import has_kernel
from tools.rehearsal.loop_rules import for_nothing, grown, unread, unreleased
from tools.rehearsal.order import Finding, order
from tools.rehearsal.overlap_rules import not_hidden
from tools.rehearsal.places import on_lines
from tools.rehearsal.roofline import MATMULS, short_name
from tools.rehearsal.step_rules import in_last_step, unplaced
from tools.rehearsal.traffic_rules import (
    left_out,
    one_way,
    out_of_order,
    unlike_layers,
)
from tools.rehearsal.work_rules import loss_scale, stand_ins, work_of_layers
from tools.rehearsal.write_rules import unwritten

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

# Where the host may wait in a step: lines that hold these words.
HOST_MAY_WAIT = {
    # on steps that are written
    "training/run/log.py": ("loss.item()", ".tolist()", "params().item()"),
    "training/run/expert_values.py": (".tolist()",),
    "training/run/layer_values.py": (".item()", ".tolist()"),
    "training/run/stop.py": ("self._arrived.synchronize()",),  # for the step before's agreement
    # --log-params-norm of masters in host memory
    "mpu/zero/norm.py": ("torch.cat(blocks).to(",),
    "mpu/optim/offload.py": ("event.synchronize()",),  # the host's AdamW waits for gradients
    # once a layer: rows of each expert
    "mpu/layers/dispatch.py": ("not_dropped(load, capacity).tolist()",),
    # an offloaded rule of full matrices, whose slices the host has
    "mpu/optim/matrix_exchange.py": ("wire.to(round_.device)", "update.to(found_inf.device)"),
}
# Where float64 is meant, and up to how many numbers: the loss and its count, the gradient norm's
# blocks, and what the update takes of them, tokens of each expert and their shares.
DOUBLE = {
    "pretrain_llama.py": 3, "mpu/auxiliary_loss.py": 2, "mpu/optim/optimizer.py": 1 << 40,
    "mpu/optim/adam.py": 1, "mpu/optim/interface.py": 1, "mpu/optim/adam_backends.py": 4,
    "mpu/optim/offload.py": 2, "mpu/zero/norm.py": 1 << 40, "training/run/log.py": 2,
    "mpu/layers/expert_load.py": 1 << 20, "model/moe.py": 1 << 12,
    "training/run/expert_values.py": 1 << 20, "training/run/layer_values.py": 1 << 20,
    "training/run/watch/guard.py": 256, "training/run/stop.py": 8,
}  # fmt: skip
# Where a bf16 run computes in fp32: norms, RoPE, the loss, gradients, masters, what blocks of
# attention are merged in; no matmul.
SINGLE = (
    "mpu/activation_offload.py",
    "mpu/gradients.py", "mpu/layers/cross_entropy.py", "mpu/layers/attention/max_logits.py",
    "mpu/layers/float8", "mpu/layers/fused",
    "mpu/layers/linear.py", "mpu/layers/linear_cross_entropy.py", "mpu/layers/rope.py",
    "mpu/layers/softmax_rows.py", "mpu/zero/", "mpu/optim/", "pretrain_llama.py", "training/run/",
    "training/data/batch.py", "mpu/layers/attention/block_attention.py",
    "mpu/layers/attention/kv_exchange.py",
    # a router's scores, sums over a token's experts, gradients of experts without rows
    "model/moe.py", "mpu/layers/dispatch.py", "mpu/layers/experts.py",
)  # fmt: skip
ENGINE = "mpu/recompute.py"  # the innermost line of what autograd itself runs in a recomputed block
IN_SINGLE = ("_Router", "_Router.backward")  # autograd functions that multiply in fp32
# Where tensors are made in host memory: tables that are copied once, and what the host updates.
ON_HOST = (
    "mpu/layers/rope.py", "mpu/gradients.py", "mpu/optim/", "mpu/zero/norm.py",
    "mpu/comm/collectives.py", "mpu/comm/symmetric", "mpu/kernels/", "training/",
    "mpu/layers/packed_seq_params.py", "mpu/layers/attention/kv_exchange.py",
    "mpu/host_memory.py", "mpu/activation_offload.py", "estimate/",
)  # fmt: skip
# Operations whose floating point inputs may be of several dtypes, by file.
MIXES = {
    "mpu/layers/attention/max_logits.py": ("aten::bmm",),  # summed in fp32
    "mpu/zero/bucket.py": ("aten::add_",),  # bf16 contributions, in fp32
    "mpu/layers/fused_gpu.py": ("aten::mul_",),
    "mpu/layers/float8/cuda.py": ("aten::_scaled_mm_v2",),  # scales are in fp32
    "mpu/layers/float8/recipe.py": ("aten::add_",),  # products in fp32, to main gradients in bf16
    # a block, into their sum
    "mpu/layers/attention/block_attention.py": ("aten::addcmul_", "aten::add_"),
    "mpu/layers/attention/kv_exchange.py": ("aten::zeros_like", "aten::new_zeros", "aten::add_"),
}
LOOKED_UP = {"model/llama.py": ("aten::index",)}  # rows of RoPE's table, which is in fp32
# what ranks sum in float64 in any run
IN_DOUBLE = (
    "optimizer: norm", "train_step: loss sum", "auxiliary_loss: loss sum",
    "token count: loss sum",
)  # fmt: skip
SUMS = (": grad sum", ": forward", ": backward", ": wgrad")  # the ends of their labels
HOST_IN_DOUBLE = ("mpu/layers/rope.py",)  # the angles of RoPE
PROMOTES = ("aten::add_", "aten::cat", "aten::stack")  # what meets a float64 number
WIDER = (
    "aten::copy_", "aten::_to_copy", "aten::mm", "aten::addmm", "aten::fill_",
    "aten::_fused_adamw_",
)  # fmt: skip
# rules of a step that went through
OF_STEPS = (
    one_way,
    out_of_order,
    unlike_layers,
    left_out,
    unwritten,
    grown,
    not_hidden,
    work_of_layers,
    loss_scale,
    unread,
    unreleased,
    for_nothing,
    stand_ins,
    unplaced,
    *expert_rules.RULES,
)
FLOATS = ("float64", "float32", "bfloat16", "float16")


def findings(seen: "Rehearsed") -> list[Finding]:
    """Return what is wrong, in the order in which it came, each place once."""
    found: dict[tuple[str, str, str], Finding] = {}
    every = [] if seen.failure is None else [seen.failure]
    chains = seen.recorder.chains
    every += [*seen.recorder.found, *in_step(seen), *in_last_step(seen)]
    if seen.recorder.device != "cpu" and seen.failure is None:
        every += [one for rule in OF_STEPS for one in rule(seen)]
    for one in [*every, *order(seen.recorder.events, chains)]:
        found.setdefault((one.kind, one.place, one.also), one)
    return list(found.values())


def in_step(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield what is wrong with single events of the last step."""
    recorder, narrow = seen.recorder, str(seen.config.run.dtype).removeprefix("torch.")
    if recorder.device == "cpu":
        return
    for place in recorder.host_made:
        if not place.startswith(ON_HOST):
            yield Finding("device", place, "a tensor is made in host memory")
    for place, dtypes in recorder.computed.items():
        if place.startswith(HOST_IN_DOUBLE) and dtypes != {"float64"}:
            what = f"the host computes in {' and '.join(sorted(dtypes))} what is rounded once"
            yield Finding("dtype", place, what)
    for index in range(seen.loop, len(recorder.events)):
        event = recorder.events[index]
        if index < seen.first and type(event) is not HostWait:
            continue  # data are read: in their own dtypes
        if type(event) is HostWait and not may_wait(event.where.place):
            what = f"the host waits for the device ({event.reads or 'synchronize'}) in a step"
            through = recorder.chains.get(index, ())
            yield Finding("host read", event.where.place, what, event.made, through)
        elif type(event) is Launch:
            for kind, what in wrong(event, narrow):
                made = [recorder.born.get(n, "") for n in (*event.read, *event.written)]
                also, through = (*made, "")[0], (*made, *event.host)
                through += recorder.chains.get(index, ())
                yield Finding(kind, event.where.place, what, also, through)
        elif type(event) is Transfer and event.op not in operations(event):
            what = f"{event.label} over {event.axis} reduces by {event.op or 'SUM'}, not by "
            what += operations(event)[0]
            yield Finding("reduction", event.where.place, what, "", recorder.chains.get(index, ()))
        elif type(event) is Transfer and event.label in IN_DOUBLE and event.dtype != "float64":
            what = f"{event.verb} over {event.axis} of {event.dtype}, which is summed in float64"
            yield Finding("dtype", event.where.place, what, "", recorder.chains.get(index, ()))
        elif type(event) is Transfer and event.label.endswith((": forward", ": backward")):
            if event.dtype in FLOATS and event.dtype != narrow and event.axis != "world":
                # weights of experts travel in the accumulation dtype: one for each choice
                weights = event.axis == "ep" and event.dtype == "float32"
                if not event.where.place.startswith(SINGLE) and not weights:
                    what = f"{event.verb} over {event.axis} of {event.dtype} in a {narrow} run"
                    through = recorder.chains.get(index, ())
                    yield Finding("dtype", event.where.place, what, "", through)


def operations(event: Transfer) -> tuple[str, ...]:
    """Return what a transfer's reduction may compute; the first is what it should."""
    if event.verb not in ("all_reduce", "reduce_scatter"):
        return (event.op,)
    if event.label.endswith("float8 scales"):
        return ("MAX",)
    return ("SUM", "") if event.label.endswith(SUMS) else (event.op,)


def may_wait(place: str) -> bool:
    """Return whether the host may wait for the device at a line."""
    return on_lines(place, HOST_MAY_WAIT)


def wrong(event: Launch, narrow: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the words of what is wrong with a launch. narrow: the run's dtype."""
    place, op = event.where.place, event.op
    if not has_kernel(op):
        yield "no kernel", f"{op} has no CUDA kernel"
    if event.host and op not in ("aten::fill_", "aten::index_put_", "aten::_fused_adamw_"):
        yield "device", f"{op} takes a tensor in host memory (made at {event.host[0]})"
    floats = {dtype for dtype in event.dtypes if dtype in FLOATS}
    doubles = zip(event.dtypes, event.shapes, strict=False)
    count = max((math.prod(shape) for dtype, shape in doubles if dtype == "float64"), default=0)
    if count > DOUBLE.get(place.partition(":")[0], 0) and narrow != "float64":
        yield "float64", f"{op} computes in float64"
    if op.startswith("aten::_fused_adam") and len(floats) > 1:
        yield "dtype", f"{op} takes its tensors and its scale in one dtype"
    if op in PROMOTES and "float64" in floats and len(floats) > 1:
        yield "dtype", f"{op} takes {' and '.join(sorted(floats))}: one of them is converted"
    if narrow not in ("bfloat16", "float16") or op.startswith("triton::"):
        return  # our own kernels load each tensor in its dtype and compute in fp32
    at = MATMULS.get(short_name(event), 0)  # where its factors stand, behind what it adds to
    updates = place.startswith(("mpu/zero/", "mpu/optim/"))
    if event.where.function in IN_SINGLE or place.startswith(ENGINE):
        return
    if event.flops and not updates and "float32" in event.dtypes[at : at + 2]:
        yield "dtype", f"{op} multiplies in float32 in a {narrow} run"
        return
    # a number alone takes the dtype of the tensor that it meets
    shaped = zip(event.dtypes, event.shapes, strict=False)
    floats = {dtype for dtype, shape in shaped if dtype in FLOATS and shape}
    if not place or "attention" in op:
        return
    file = place.partition(":")[0]
    if "float32" in floats and not place.startswith(SINGLE) and op not in LOOKED_UP.get(file, ()):
        yield "dtype", f"{op} computes in float32 in a {narrow} run"
    elif len(floats) > 1 and op not in WIDER:
        rings = op == "aten::add_" and event.where.part == "linear" and event.dtypes[0] == "float32"
        if op not in MIXES.get(file, ()) and not rings:  # a ring adds bf16 parts in fp32
            yield "dtype", f"{op} mixes {' and '.join(sorted(floats))}"
