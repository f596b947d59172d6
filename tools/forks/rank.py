# SPDX-License-Identifier: Apache-2.0
"""Run one layout of tools/fork_check.py on one rank, and record the tensors to compare.

Each rank records (training/run/watch/recorder.py), in fp64:

    initial  the weights as `initialize` draws them; every layout must draw the same bits
    0        the first step. Its weights are these plus noise: none is at 0 or 1, where a mistake
             may have no effect. So the steps do not test `initialize`
    1        the second step, whose batch has documents and a loss mask
    2        a third step, on one rank, and in layouts that have loaded the weights after the second

The product's own code does all of it: pretrain_llama.build and train_step, Saver.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pretrain_llama
from forecast.obeyed_flags import check_attention, check_flags
from model.load import load_model_file
from mpu.launch import Launch
from mpu.param import PlacementError, saved_buffers
from mpu.zero.gradient_check import GradientCheck
from pretrain_llama import LlamaRun, build
from tools.forks.case import (
    Case,
    Desk,
    Report,
    batches_of,
    forward,
    noise_of,
    put,
    record_weights,
    rectangles,
    step,
)
from tools.forks.fields import fields_of_config
from tools.forks.huggingface import compare as compare_transformers
from tools.forks.one import (
    SAME,
    Casts,
    decodes,
    derivatives,
    documents,
    draws,
    initial_values,
    loss_of_logits,
    names_of,
)
from training.faults.monitor import FailureMonitor
from training.run.model_profile import make_grid
from training.run.saver import Saver
from training.run.start import connect

CPU = torch.device("cpu")


def saver_of(run: LlamaRun) -> Saver:
    """Return the run's Saver, as pretrain_llama.work makes it."""
    file = load_model_file(run.config.model.model_file)
    return Saver(
        run.config, run.model.ctx, run.model, run.optimizer, file.hf_names(run.model),
        digests={}, note=lambda line: None,
        hf_config=file.hf_config, from_hf_config=file.from_hf_config,
    )  # fmt: skip


@contextmanager
def started(desk: Desk, case: Case, rank: int, store: Any, limit: float) -> Iterator[LlamaRun]:
    """Connect the ranks of a case, build the run, and leave the group at the end."""
    config = desk.config(case)
    check_attention(config, pretrain_llama.model_provider)
    check_flags(config, pretrain_llama.model_provider)
    grid = make_grid(config, Launch(rank, case.ranks, rank, case.ranks))
    timeout = timedelta(seconds=2 * limit)
    own = dist.PrefixStore(f"{case.name}, {case.record}", store)
    connect(config, grid, CPU, own, timeout, lambda line: None)
    try:
        yield build(config, grid, CPU, FailureMonitor())
    finally:
        grid.close()


def work(desk: Desk, case: Case, rank: int, store: Any, limit: float) -> dict[str, Any]:
    """Run a case on one rank; return its Report as a dict."""
    report = Report()
    if case.oracle and case.record < 0:
        for kind, sentence in names_of(desk.config(case)):
            report.findings.append((kind, "", sentence))
        if report.findings:
            return asdict(report)
    with started(desk, case, rank, store, limit) as run:
        if case.record >= 0:
            record(desk, case, run)
            return asdict(report)
        if case.oracle:
            ask_one_rank(desk, case, run, report)
        else:
            take_steps(desk, case, run, report)
            alone = run.grid.pp.size == run.grid.dp_cp.size == 1
            if alone and not case.load and not run.model.ctx.sp:
                decode(run, report)
        if case.save:
            saver_of(run).save(2, 2 * run.config.batch.global_batch_size, must=True)
    return asdict(report)


def record(desk: Desk, case: Case, run: LlamaRun) -> None:
    """Run up to the step `case.record`, as `take_steps` does, and record all its tensors."""
    if case.load:
        saver_of(run).resume.load()
    else:
        put(run, desk.one_rank(case.tied, 0).whole("weight", "before"))
    for number in range(2 if case.load else 0, case.record):
        step(run, number)
    step(run, case.record, desk.record(case.name, case.record, inside=True), inside=True)


def ask_one_rank(desk: Desk, case: Case, run: LlamaRun, report: Report) -> None:
    """Record the reference for other layouts, and run the checks that need one rank only."""
    record_weights(run, desk.record(case.name, "initial"))
    initial = desk.one_rank(case.tied, "initial").whole("weight", "before")
    start = {}
    for name, values in initial.items():
        start[name] = values + noise_of(name, values)
        if not values.isfinite().all():
            report.findings.append(("initial", name, f"{name} is not finite after initialize()"))
            start[name] = start[name].nan_to_num(1.0)
    put(run, start)
    buffers = {name: buffer.clone() for name, buffer in saved_buffers(run.model)}
    if why := draws(run, lambda folder: forward(run, folder), Path(desk.folder, "draws")):
        report.findings.append(("random", "", why))
        return
    with Casts(desk.model) as casts:
        first = forward(run)
    if lines := casts.said():
        report.findings += [("rounded", "", line) for line in lines]
        return
    report.warnings += casts.warned()
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # slow: here only
            losses = [step(run, number, desk.record(case.name, number))[0] for number in range(3)]
    except RuntimeError as failure:
        failure.add_note(casts.written())
        raise
    report.errors["loss"] = abs(first - losses[0])
    if not report.errors["loss"] <= SAME * abs(first):
        line = f"the loss of a forward pass is {first:.10g} and that of a step {losses[0]:.10g}: a "
        line += "block must continue with the tensor that ctx.auxiliary_loss returns"
        report.findings.append(("auxiliary", "", line))
    put(run, start)
    for name, buffer in saved_buffers(run.model):  # a step may change them, as a router's bias
        buffer.copy_(buffers[name])
    gradients = desk.one_rank(case.tied, 0).whole("gradient")
    found = derivatives(list(rectangles(run)), gradients, lambda: forward(run))
    report.error("derivative", found[0])
    if names := run.sink.frozen.names:
        some = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        report.notes.append(f"frozen parameters, {len(names)}: {some}")
    report.findings += [("derivative", name, line) for name, line in found[1]]
    report.warnings += found[2]
    decode(run, report)
    batch = batches_of(run, 0)[0]
    error, line = documents(run.model, batch.tokens)
    report.error("documents", error)
    report.findings += [("documents", "", line)] if line else []
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
    findings, notes = compare_transformers(file, sizes, batch.tokens)
    report.findings += findings
    report.notes += notes


def decode(run: LlamaRun, report: Report) -> None:
    """Compare decode with forward."""
    error, line = decodes(run.model, batches_of(run, 0)[0].tokens)
    report.error("decode", error)
    report.findings += [("decode", "", line)] if line else []


def take_steps(desk: Desk, case: Case, run: LlamaRun, report: Report) -> None:
    """Run and record the steps that are compared with one rank's."""
    if case.load:
        saver_of(run).resume.load()
        step(run, 2, desk.record(case.name, 2))
        return
    record_weights(run, desk.record(case.name, "initial"))
    start = desk.one_rank(case.tied, 0).whole("weight", "before")
    for _, _, piece in rectangles(run):
        if piece.name not in start or start[piece.name].shape != torch.Size(piece.shape):
            return  # the comparison of the initial weights reports it
    put(run, start)
    run.sink.check = GradientCheck(run.grid, report.warnings.append)
    try:
        step(run, 0, desk.record(case.name, 0))
    except PlacementError as error:  # the run's own check of the first gradients; on all ranks
        report.findings.append(("replicas", str(error).partition(":")[0], str(error)))
        return
    step(run, 1, desk.record(case.name, 1))
