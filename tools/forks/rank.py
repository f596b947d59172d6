# SPDX-License-Identifier: Apache-2.0
"""Run one layout of tools/fork_check.py on one rank, and compare it with the case "one rank".

The case "one rank" computes what all others are compared with, in fp64, and keeps it in a file:

    initial    the weights as `initialize` draws them; every layout must draw the same bits
    start      these and some noise: no weight is at 0 or 1, where a mistake may have no effect.
               Every layout starts from it, so that what follows says nothing about `initialize`
    gradients  of the first step; the second step's batch has documents and a loss mask
    two        weights after two steps; three: after one more, which a loaded run must repeat

All of it is done by the product: pretrain_llama.build and train_step, Saver, the dry run's plan.
"""

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pretrain_llama
from forecast import recording
from forecast.obeyed_flags import check_attention, check_flags
from forecast.traffic import rows
from model.load import load_model_file
from mpu.comm.transport import Axis, Label
from mpu.launch import Launch
from mpu.param import PlacementError, saved_buffers
from mpu.zero.gradient_check import GradientCheck
from pretrain_llama import LlamaRun, build
from tools.forks.case import (
    Case,
    Desk,
    Oracle,
    Report,
    batches_of,
    cut,
    describe_error,
    forward,
    pieces,
    put,
    rectangles,
    step,
    whole,
)
from tools.forks.fields import fields_of_config, keys_of_json
from tools.forks.huggingface import compare as compare_transformers
from tools.forks.one import (
    Casts,
    decodes,
    derivatives,
    draws,
    initial_values,
    loss_of_logits,
    names_of,
)
from training.faults.monitor import FailureMonitor
from training.run.model_profile import make_grid
from training.run.saver import Saver
from training.run.start import connect

EXACT, UPDATE = 1e-10, 1e-6  # largest error of a gradient, and of the weights' change, by norm
FLOOR = 1e-4  # a gradient smaller than that part of the whole one counts as so large
ITEM, ROUNDED = 8, 64  # bytes of an element in fp64, and of what may be rounded off
CPU = torch.device("cpu")
EVEN = "--moe-router-force-load-balancing"
CHECKS = {"gradient check"}  # purposes of what is not in every step


class Sent:
    """A trace for a grid that adds up the bytes which leave this rank, by axis as planned."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.counting = False  # in one step only

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is sent inside."""
        self.counting = True
        yield
        self.counting = False

    def issued(
        self,
        verb: str,
        axis: Axis,
        tensor: Tensor,
        sent: int,
        is_async: bool,
        label: Label | None,
    ) -> None:
        """Count one collective or message."""
        if self.counting and (label is None or label.phase not in CHECKS):
            self.bytes[axis.name] += sent


def saver_of(run: LlamaRun) -> Saver:
    """Return what saves and loads the run, as pretrain_llama.work makes it."""
    file = load_model_file(run.config.model.model_file)
    return Saver(
        run.config, run.model.ctx, run.model, run.optimizer, file.hf_names(run.model),
        digests={}, note=lambda line: None,
        hf_config=file.hf_config, from_hf_config=file.from_hf_config,
    )  # fmt: skip


@contextmanager
def started(
    desk: Desk, case: Case, rank: int, store: Any, limit: float
) -> Iterator[tuple[LlamaRun, Sent]]:
    """Connect the ranks of a case, build the run, and leave the group at the end."""
    config = desk.config(case)
    check_attention(config, pretrain_llama.model_provider)
    check_flags(config, pretrain_llama.model_provider)
    grid = make_grid(config, Launch(rank, case.ranks, rank, case.ranks))
    timeout = timedelta(seconds=2 * limit)
    connect(config, grid, CPU, dist.PrefixStore(case.name, store), timeout, lambda line: None)
    sent = Sent()
    grid.traced(sent)
    try:
        yield build(config, grid, CPU, FailureMonitor()), sent
    finally:
        grid.close()


def work(desk: Desk, case: Case, rank: int, store: Any, limit: float) -> dict[str, Any]:
    """Do a case on one rank; return its Report as a dict."""
    report = Report()
    if case.oracle:
        for kind, sentence in names_of(desk.config(case)):
            report.findings.append((kind, "", sentence))
        if report.findings:
            return asdict(report)
    with started(desk, case, rank, store, limit) as (run, sent):
        if case.record >= 0:
            record(desk, case, run)
            return asdict(report)
        if case.oracle:
            ask_one_rank(desk, case, run, report)
            done = False
        else:
            report.rectangles = [(p.name, p.dim, p.start, p.size) for _, _, p in rectangles(run)]
            oracle = desk.oracle(case.tied)
            if case.load:
                saver_of(run).resume.load()
                go_on(run, oracle, report)
                done = False
            elif (done := compare(run, oracle, report, sent)) and not by_choice(run):
                plan(run, sent, report)
            alone = run.grid.pp.size == run.grid.dp_cp.size == 1
            if alone and not case.load and not run.model.ctx.sp:
                decode(run, report)
        if case.save:
            saver_of(run).save(2, 2 * run.config.batch.global_batch_size, must=True)
        again = done and by_choice(run)
    if again:
        even = case._replace(name=f"{case.name}, even", flags=(*case.flags, EVEN))
        with started(desk, even, rank, store, limit) as (run, sent):
            step(run, 0)
            with sent.counted():
                step(run, 1)
            plan(run, sent, report)
    return asdict(report)


def by_choice(run: LlamaRun) -> bool:
    """Return whether what a rank sends depends on which experts its tokens choose.

    The dry run then states what an even choice sends.
    """
    return run.grid.ep.size > 1 and run.model.ctx.experts.dispatcher != "allgather"


def record(desk: Desk, case: Case, run: LlamaRun) -> None:
    """Go to the step that is to be recorded, as `compare` or `go_on` does, and record it."""
    if case.load:
        saver_of(run).resume.load()
    else:
        put(run, desk.oracle(case.tied).tensors["start"])
    for number in range(2 if case.load else 0, case.record):
        step(run, number)
    step(run, case.record, desk.record(case))


def ask_one_rank(desk: Desk, case: Case, run: LlamaRun, report: Report) -> None:
    """Compute what other layouts are compared with, and what one rank alone can tell."""
    initial = whole(pieces(run, "param_shard"))
    start = {}
    for name, values in initial.items():
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        start[name] = values + 0.1 * torch.randn(values.shape, generator=g, dtype=values.dtype)
        if not values.isfinite().all():
            report.findings.append(("initial", name, f"{name} is not finite after initialize()"))
            start[name] = start[name].nan_to_num(1.0)
    put(run, start)
    buffers = {name: buffer.clone() for name, buffer in saved_buffers(run.model)}
    with Casts(desk.model) as casts:
        first, outputs = forward(run)
    report.findings += [("rounded", "", line) for line in casts.said()]
    report.findings += [("random", "", line) for line in draws(run, outputs, lambda: forward(run))]
    if report.findings:
        return
    losses, norms = [], []
    tensors = {"initial": initial, "start": start}
    for number in range(3):
        loss, norm = step(run, number)
        losses.append(loss)
        norms.append(norm)
        saved = {
            0: ("gradients", "grad_shard"),
            1: ("two", "param_shard"),
            2: ("three", "param_shard"),
        }
        kind, where = saved[number]
        tensors[kind] = whole(pieces(run, where))
    report.errors["loss"] = abs(first - losses[0])
    Oracle(tensors, losses, norms[0]).write(Path(desk.folder), case.tied)
    put(run, start)
    for name, buffer in saved_buffers(run.model):  # a step may move them, as the bias of a choice
        buffer.copy_(buffers[name])
    found = derivatives(list(rectangles(run)), tensors["gradients"], lambda: forward(run)[0])
    report.error("derivative", found[0])
    if names := run.sink.frozen.names:
        some = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        report.notes.append(f"frozen parameters, {len(names)}: {some}")
    report.findings += [("derivative", name, line) for name, line in found[1]]
    report.warnings += found[2]
    decode(run, report)
    batch = batches_of(run, 0)[0]
    if not desk.own_loss:
        error, line = loss_of_logits(run.model, batch.tokens, batch.labels)
        report.error("loss of logits", error)
        report.findings += [("loss of logits", "", line)] if line else []
    sizes = run.model.config
    line, odd = initial_values(initial, sizes.init_method_std, sizes.num_layers)
    report.notes.append(f"tied, {line}" if case.tied else line)
    report.warnings += odd
    file = load_model_file(run.config.model.model_file)
    report.findings += fields_of_config(file, sizes, batch.tokens)
    report.findings += keys_of_json(file, sizes)
    findings, notes = compare_transformers(file, sizes, batch.tokens)
    report.findings += findings
    report.notes += notes


def decode(run: LlamaRun, report: Report) -> None:
    """Hold decode against forward."""
    error, line = decodes(run.model, batches_of(run, 0)[0].tokens)
    report.error("decode", error)
    report.findings += [("decode", "", line)] if line else []


def compare(run: LlamaRun, oracle: Oracle, report: Report, sent: Sent) -> bool:
    """Hold initial weights and two steps of the run against one rank's; return if they were made.

    sent: counts what the second step sends.
    """
    for piece, values in pieces(run, "param_shard"):
        name, want = piece.name, oracle.tensors["initial"].get(piece.name)
        if want is None or want.shape != piece.shape:
            shape = None if want is None else list(want.shape)
            line = (
                f"{name} has the full shape {list(piece.shape)} here and {shape} on one rank: a "
                "size that is divided by tp needs a Placement that says so (mpu/param.py)"
            )
            report.findings.append(("shape", name, line))
        elif not torch.equal(values, cut(want, piece)):
            line = (
                f"{name}: initialize() gives it other values here than on one rank: draw it by "
                "mpu.param.draw_normal, which cuts the same whole tensor for every layout"
            )
            report.findings.append(("initial", name, line))
    if any(kind == "shape" for kind, _, _ in report.findings):
        return False
    put(run, oracle.tensors["start"])
    run.sink.check = GradientCheck(run.grid, report.warnings.append)
    try:
        loss, norm = step(run, 0)
    except PlacementError as error:  # the run's own check of the first gradients; on all ranks
        report.findings.append(("replicas", str(error).partition(":")[0], str(error)))
        return False
    gradients = pieces(run, "grad_shard")
    losses_differ(report, loss, oracle.losses[0], "first")
    total = sum(t.square().sum() for t in oracle.tensors["gradients"].values()) ** 0.5
    for piece, values in gradients:
        name, full = piece.name, oracle.tensors["gradients"][piece.name]
        want, least = cut(full, piece), max(full.norm(), FLOOR * total)
        distance = float((values - want).norm() / least)
        report.error("gradients", distance)
        if not distance <= EXACT:
            report.findings.append(("gradient", name, how(name, values, want, distance)))
    off = abs(norm - oracle.norm) / oracle.norm
    report.error("gradients", off)
    if not off <= EXACT:
        line = f"the gradient's norm is {norm:.10g} and not {oracle.norm:.10g}"
        report.findings.append(("norm", "", line))
    with sent.counted():
        loss, _ = step(run, 1)
    losses_differ(report, loss, oracle.losses[1], "second")
    weights_differ(run, oracle, report, ("start", "two"))
    return True


def go_on(run: LlamaRun, oracle: Oracle, report: Report) -> None:
    """Hold loaded weights, and one more step, against one rank's."""
    weights_differ(run, oracle, report, ("start", "two"), "load")
    loss, _ = step(run, 2)
    losses_differ(report, loss, oracle.losses[2], "third")
    weights_differ(run, oracle, report, ("two", "three"))


def losses_differ(report: Report, loss: float, want: float, which: str) -> None:
    """Compare the loss of a step."""
    off = abs(loss - want) / abs(want)
    report.error("loss", off)
    if not off <= EXACT:
        line = f"the loss of the {which} step is {loss:.10g} and not {want:.10g}"
        report.findings.append(("loss" if which == "first" else "later", "", line))


def weights_differ(
    run: LlamaRun, oracle: Oracle, report: Report, kinds: tuple[str, str], why: str = "update"
) -> None:
    """Compare weights, relative to how far one rank's have moved, or where its gradient is mere
    rounding, which Adam divides by its own size, relative to their own size.
    """
    before, after = (oracle.tensors[kind] for kind in kinds)
    gradients = oracle.tensors["gradients"]
    noise = EXACT * sum(t.square().sum() for t in gradients.values()) ** 0.5
    for piece, values in pieces(run, "param_shard"):
        name = piece.name
        if name not in after or after[name].shape != piece.shape:
            continue
        some = gradients[name].norm() > noise
        size = (after[name] - before[name] if some else after[name]).norm()
        error = float((values - cut(after[name], piece)).norm() / size.clamp(min=1e-6))
        report.error("weights", error)
        if not error <= UPDATE:
            what = (
                "what was loaded is not what was saved" if why == "load" else "its update differs"
            )
            report.findings.append((why, name, f"{name}: {what}, by {error:.2g} of its change"))


def how(name: str, got: Tensor, want: Tensor, error: float) -> str:
    """Say in which way a gradient differs."""
    text = f"the gradient of {name}"
    if not got.isfinite().all():
        return f"{text} is not finite"
    if not got.any():
        return f"{text} is zero"
    scale = float((got * want).sum() / want.square().sum()) if want.any() else 0.0
    if (got - scale * want).norm() < 1e-6 * got.norm():
        return f"{text} is {scale:.6g} times what it should be"
    return f"{text} differs by {error:.2g} of its norm"


def plan(run: LlamaRun, sent: Sent, report: Report) -> None:
    """Hold what the run keeps and sends against what the dry run states."""
    try:
        plan_differs(run, sent, report)
    except Exception as error:
        line = f"its dry run fails, {describe_error(error, run.config.model.model_file)}"
        report.findings.append(("plan", "", line))


def plan_differs(run: LlamaRun, sent: Sent, report: Report) -> None:
    """Compare bytes by kind of memory, and by axis. Raises what the dry run raises."""
    config, at = run.config, run.grid.pp.rank
    planned = recording.record(config, pretrain_llama, [at], member=run.grid.rank)[at]
    for kind, found in run.optimizer.memory().items():
        if (kept := planned.start[kind]) != found:
            line = f"it keeps {found:,} bytes of {kind}, and the dry run says {kept:,}"
            report.findings.append(("plan", "", line))
    stated: Counter[str] = Counter()
    for row in rows(planned):
        stated[row.axis] += row.sent
    m, parallel = config.model, config.parallel
    tokens = m.seq_length * config.batch.micro_batch_size
    tokens //= parallel.context_parallel_size * (run.grid.tp.size if run.model.ctx.sp else 1)
    if by_choice(run) and tokens * config.moe.moe_router_topk % config.moe.num_experts:
        report.notes.append(
            f"bytes over ep were not compared with the dry run's: {tokens} tokens a rank cannot "
            "choose all experts equally often"
        )
        stated.pop("ep", None)
        sent.bytes.pop("ep", None)
    for axis in sorted(stated.keys() | sent.bytes.keys()):
        found, should = sent.bytes[axis], stated[axis]
        if abs(found - should) > ROUNDED:
            line = f"it sends {found:,} bytes a step over {axis}, and the dry run says {should:,}"
            report.findings.append(("plan", "", line))
