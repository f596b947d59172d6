# SPDX-License-Identifier: Apache-2.0
"""Format plans: a ranked table, the command, a comparison of a layout with the best by terms."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from forecast.planner.measured import Measured
from forecast.planner.own import dtype_of
from forecast.planner.recorded import Recorded
from forecast.planner.search import COMPARISON_ERROR, RISK, Plans, recommended
from forecast.rehearsal.clock import Timing
from training.run.text import aligned
from training.settings.config import Config

ERROR = 0.3  # assumed error for a program that was never timed on this device: docs/predictions.md
MILLION = 1_000_000
COLUMNS = 100
EXAMPLE = "--mock-data --lr 3e-4 --train-iters 20"
TERMS = {  # terms of a step, each with its kinds and axes of Timing; "dp" has all others
    "compute": ("compute of the rank", ("matmul", "attention", "passes")),
    "tp": ("exposed transfers of tp", ("tp", "tp_kv")),
    "cp": ("exposed transfers of cp", ("cp",)),
    "ep": ("exposed transfers of tokens to experts and back", ("ep",)),
    "pp": ("exposed messages between stages", ("pp", "pp_back")),
    "dp": ("exposed reductions of gradients and gathers of weights", ()),
    "copies": ("exposed copies to and from the host", ("copies", "host link")),
    "host": ("waiting for the host", ("host",)),
    "bubble": ("the pipeline's bubble", ("bubble",)),
    "update": ("the optimizer", ("update", "tp_dp_cp_shard", "ep_edp_shard")),
}
MEANINGS = "; ".join(f"{key}: {meaning}" for key, (meaning, _) in TERMS.items())
KINDS = {  # of the table: kinds of memory as --dry-run names them
    "parameters": ("parameters", "gathered weights", "weights in float8"),
    "gradients": ("gradients", "unsharded gradients"),
    "optimizer": ("masters", "moments"),
    "activations": ("activations", "messages"),
    "logits": ("logits",),
    "working memory": ("working memory", "workspaces", "other state"),
}


def breakdown(timing: Timing) -> dict[str, float]:
    """Return the seconds of a step by the keys of TERMS; they add up to it."""
    parts = {**timing.busy_seconds, **timing.exposed_seconds, "host": timing.host_seconds}
    homes = {name: key for key, (_, names) in TERMS.items() for name in names}
    found = dict.fromkeys(TERMS, 0.0)
    for name, seconds in parts.items():
        found[homes.get(name, "dp")] += seconds
    return found


def ranking(
    plans: Plans, best: Sequence[Recorded], tokens: float, results: Mapping[str, Measured]
) -> list[str]:
    """Return the table of the best layouts, and the command of the recommended one.

    results: measurements, by the layouts' flags.
    """
    cluster, m = plans.cluster, plans.model.config.model
    each = plans.layouts[0]
    batch = each.micro_batch * each.micro_batches * each.dp
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}"
    ranks = "CPU ranks" if cluster.cpu else f"GPUs of {cluster.device}"
    lines = [
        f"{plans.model.name} on {cluster.gpus:,} {ranks} ({nodes}), "
        f"{batch:,} sequences of {m.seq_length:,} tokens: {len(plans.layouts):,} layouts, "
        f"{int(plans.fits.sum()):,} fit",
    ]
    if not best:
        least = int(plans.bytes.argmin())
        need = f"{plans.bytes[least] / 1e9:.1f} GB: {plans.layouts[least].flags()}"
        lines.append(f"none fits {plans.limit / 1e9:.1f} GB; the smallest needs {need}")
        return lines
    known = [results.get(run.flags) for run in best]
    measured = ["measured"] * any(known)
    rows: list[Sequence[str]] = [
        ("", *measured, "step s", "tokens/s/GPU", "MFU", "GPU-hours", "GB", "free")
    ]
    tight = False
    for number, run in enumerate(best, 1):
        tight |= run.free < RISK
        rows.append((
            str(number), *[measured_of(run, known[number - 1])] * len(measured),
            f"{run.played.step_seconds:.2f}", f"{run.rate:,.0f}",
            f"{run.played.mfu:.1%}", f"{tokens / run.rate / 3600:,.0f}",
            f"{run.bytes / 1e9:.1f}", f"{run.free:.0%}" + "!" * (run.free < RISK),
        ))  # fmt: skip
    doubt = f"+-{ERROR:.0%}"
    if cluster.cpu:
        doubt = "they are for an assumed CPU core, so --measure the layouts that matter to you"
    texts = ["layout", *(described(run.config) for run in best)]
    for row, text in zip(aligned(rows), texts, strict=True):
        first, *rest = textwrap.wrap(text, COLUMNS - len(row) - 2)
        lines += [f"{row}  {first}", *(" " * (len(row) + 2) + part for part in rest)]
    lines.append(
        f"Seconds, tokens, MFU and GPU-hours (for {tokens:.3g} tokens) are computed as by "
        f"--rehearse, and not measured: {doubt}. GB is computed as by --dry-run; free: of "
        f"{cluster.memory / 1e9:.0f} GB, without the memory of context and libraries. b: the "
        "micro-batch size of the layout."
    )
    if measured:
        lines.append(
            "measured: tokens/s/GPU of a run on your GPUs (the median of its steps), and its "
            "difference from the computed value"
        )
    for number, result in enumerate(known, 1):
        if result is not None and result.error:
            lines.append(f"{number} failed: {result.error}")
    if tight:
        lines.append(
            f"!: less than {RISK:.0%} of the memory is free, which fragmentation or a longer "
            "sequence may need"
        )
    lines += [*parts_of(best), *edges_of(best)]
    taken = best[0] if measured else recommended(best)
    near = f"the simplest of those within {COMPARISON_ERROR:.1%} of the fastest"
    which = "the fastest" if taken is best[0] else near
    lines.append(
        f"Layout {best.index(taken) + 1}, {which}; replace {EXAMPLE} by your own flags:"
    )
    return [*lines, *command_lines(taken)]


def measured_of(run: Recorded, result: Measured | None) -> str:
    """Return a layout's measured rate, and its difference from the computed one."""
    if result is None or result.error:
        return "failed" if result else "-"
    rate = result.tokens_per_second / run.cluster.gpus
    return f"{rate:,.0f} ({rate / run.rate - 1:+.0%})"


def wrapped(line: str) -> list[str]:
    """Return a line of text wrapped at COLUMNS; lines of commands and tables stay as they are."""
    if len(line) <= COLUMNS or " \\\n" in line or "   " in line:
        return [line]
    return textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)


def described(config: Config) -> str:
    """Return a layout in words: "tp 8 ring, pp 4 x 2, dp 2, b 1, ZeRO 1, recompute full"."""
    p, b = config.parallel, config.batch
    words = [f"tp {p.tensor_model_parallel_size}"]
    words[0] += f" {p.tp_comm_overlap}" * (p.tp_comm_overlap != "none")
    if (cp := p.context_parallel_size) > 1:
        words.append(f"cp {cp} {p.cp_comm_type}")
    if ep := config.expert_model_parallel_size:
        words.append(f"ep {ep}" + " overlapped" * p.overlap_moe_expert_parallel_comm)
    if (pp := p.pipeline_model_parallel_size) > 1:
        named = "" if p.schedule in ("1f1b", "interleaved") else f" {p.schedule}"
        v = p.virtual_stages
        words.append(f"pp {pp}" + (f" x {v}" * (v > 1 and not named)) + named)
    words += [f"dp {p.data_parallel_size}", f"b {b.micro_batch_size}"]
    words += [f"ZeRO {p.zero}"] * (p.zero > 0)
    dtype = dtype_of(config)
    return ", ".join([*words, *activations_of(config), *[dtype] * (dtype != "bf16")])


def activations_of(config: Config) -> list[str]:
    """Return a layout's recomputation and offloading, in words."""
    p = config.parallel
    again = p.recompute_granularity or "none"
    if again == "full" and p.recompute_method == "block":
        again = f"{p.recompute_num_layers or 1} layers a stage"
    words = [f"recompute {again}"] * (again != "none")
    words += ["activations in host memory"] * config.gpu.cpu_offload_activations
    on_host = p.optimizer_cpu_offload
    words += ["optimizer's state in host memory"] * (p.optimizer_state_offload and not on_host)
    return words + ["update on the host"] * on_host


def command_lines(run: Recorded) -> list[str]:
    """Return the command that starts a layout, in lines of a shell."""
    cluster = run.cluster
    start = "torchrun --standalone"
    if cluster.nodes > 1:
        start = f"torchrun --nnodes {cluster.nodes} --node-rank $NODE --master-addr $HOST"
    words = f"{run.command} {EXAMPLE}".split()
    lines = [f"{start} --nproc-per-node {cluster.node} pretrain_llama.py"]
    line = ""
    for word in words:
        if len(line) + len(word) > COLUMNS - 6 and word.startswith("--"):
            lines, line = [*lines, line], ""
        line += f" {word}"
    lines.append(line)
    return [" \\\n ".join(lines)]


def by_kind(run: Recorded) -> list[float]:
    """Return the GB of a layout's fullest rank in the order of KINDS."""
    kinds = run.fullest
    return [sum(kinds.get(name, 0.0) for name in names) / 1e9 for names in KINDS.values()]


def parts_of(runs: Sequence[Recorded]) -> list[str]:
    """Return, for each layout, the parts of its step and its fullest rank's memory by kind."""
    steps, memory = [("", *TERMS)], [("", *KINDS)]
    for number, run in enumerate(runs, 1):
        parts = breakdown(run.played)
        shares = [f"{seconds / sum(parts.values()):.1%}" for seconds in parts.values()]
        steps.append((str(number), *shares))
        memory.append((str(number), *(f"{gb:.2f}" for gb in by_kind(run))))
    return [
        f"parts of the step of rank 0 ({MEANINGS})", *aligned(steps),
        "peak memory in GB of the pipeline rank with the highest peak", *aligned(memory),
    ]  # fmt: skip


def edges_of(runs: Sequence[Recorded]) -> list[str]:
    """Return the margins of each layout: memory left on the device and the host, host's load."""
    rows: list[Sequence[str]] = [("", "GB left", "%", "host GB left", "%", "host busy")]
    cluster = runs[0].cluster
    for number, run in enumerate(runs, 1):
        left, there = cluster.limit - run.bytes, cluster.host - run.in_host
        offloaded = ["-", "-"]
        if run.in_host:
            offloaded = [f"{there / 1e9:,.1f}", f"{there / cluster.host:.1%}"]
        share = run.played.bounds.get("host", 0.0) / run.played.step_seconds
        rows.append((str(number), f"{left / 1e9:.1f}", f"{left / cluster.memory:.1%}",
                     *offloaded, f"{share:.0%}"))  # fmt: skip
    return [
        f"margins (GB left: of the {cluster.limit / 1e9:.1f} GB available to a plan, and % of "
        f"the device's {cluster.memory / 1e9:.1f}; host GB left: of the "
        f"{cluster.host / 1e9:,.0f} GB of a node for offloaded activations and state; host busy: "
        "the host's time to launch the step of rank 0, over the step time)",
        *aligned(rows),
    ]  # fmt: skip


def rank_orders(runs: Mapping[str, Recorded]) -> list[str]:
    """Return the table of a layout's rank orders, the fastest first, and the flag of that one.

    runs: played runs, by order. Orders with equal printed seconds stay in the given order.
    """
    rows: list[Sequence[str]] = [("order", "step s", *TERMS)]
    for order, run in runs.items():
        parts = breakdown(run.played)
        step = f"{run.played.step_seconds:#.4g}".removesuffix(".")
        rows.append((order, step, *(f"{seconds:.3f}" for seconds in parts.values())))
    rows[1:] = sorted(rows[1:], key=lambda row: float(row[1]))
    return [
        *aligned(rows),
        f"seconds of a step of rank 0, and its parts ({MEANINGS})",
        f"flag of the fastest: --rank-order {rows[1][0]}",
    ]


def work_of(run: Recorded) -> tuple[str, str, str]:
    """Return the work of a layout's step: batch, sequence length, dtype of its matmuls."""
    config = run.config
    batch, length = config.batch.global_batch_size, config.model.seq_length
    return f"{batch:,} sequences", f"{length:,} tokens", dtype_of(config)


def describe_work(question: tuple[str, str, str]) -> str:
    return "{} of {}, matmuls in {}".format(*question)


def why(yours: Recorded, best: Recorded | None) -> list[str]:
    """Return a comparison of a layout with the best one by terms. best: None if no layout fits.

    Seconds are per step if both have the same batch and sequence length, else per MILLION tokens; a
    line states which, and what differs.
    """
    cluster = yours.cluster
    lines = [f"yours: {yours.flags}"]
    if not yours.fits:
        need = f"{yours.bytes / 1e9:.1f} GB of {cluster.limit / 1e9:.1f} GB available"
        lines.append(f"it does not fit: it needs {need}")
    lines += edges_of([yours])
    if best is None:
        return [*lines, "no layout fits, so there is no best one to compare with"]
    lines.append(f"best:  {best.flags}")
    both = work_of(yours), work_of(best)
    where = f"on {cluster.gpus:,} GPUs of {cluster.device}"
    mine, other = (
        {**breakdown(run.played), "step": run.played.step_seconds} for run in (yours, best)
    )
    if both[0] == both[1]:
        unit = "s"
        lines.append(f"seconds of a step: {describe_work(both[0])}, {where}, for both")
    else:
        unit = "s/Mtoken"
        lines.append(
            f"seconds of {MILLION:,} tokens, as the two do different work {where}: yours "
            f"{describe_work(both[0])}; best {describe_work(both[1])}"
        )
        mine = {key: value * MILLION / yours.tokens for key, value in mine.items()}
        other = {key: value * MILLION / best.tokens for key, value in other.items()}
    digits = 3 + max(0, -int(np.floor(np.log10(min(mine["step"], other["step"])))))
    rows: list[Sequence[str]] = [("", f"yours {unit}", f"best {unit}", "difference")]
    meanings = {key: meaning for key, (meaning, _) in TERMS.items()}
    for key, meaning in {**meanings, "step": "step" if unit == "s" else "sum"}.items():
        a, b = mine[key], other[key]
        rows.append((meaning, *(f"{x:.{digits}f}" for x in (a, b)), f"{a - b:+.{digits}f}"))
    gb = (yours.bytes / 1e9, best.bytes / 1e9)
    rows.append(("memory, GB", f"{gb[0]:.1f}", f"{gb[1]:.1f}", f"{gb[0] - gb[1]:+.1f}"))
    for title, a, b in zip(KINDS, by_kind(yours), by_kind(best), strict=True):
        rows.append((f"  {title}", f"{a:.1f}", f"{b:.1f}", f"{a - b:+.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        row[0].ljust(widths[0]) + "  " + "  ".join(map(str.rjust, row[1:], widths[1:]))
        for row in rows
    ]
    return [*lines, verdict(mine, other, "a step" if unit == "s" else "a token")]


def verdict(yours: dict[str, float], best: dict[str, float], of: str) -> str:
    """Return a sentence that compares two layouts and names the term that differs most."""
    slower = yours["step"] / best["step"]
    gap = {key: yours[key] - best[key] for key in TERMS}
    worst = max(gap, key=lambda key: abs(gap[key]))
    if abs(gap[worst]) < 1e-9 * best["step"]:
        return f"yours takes as long as the best for {of}"
    close = bool(abs(slower - 1) <= COMPARISON_ERROR)
    near = f"; that is within the error of a comparison, {COMPARISON_ERROR:.0%}" * close
    return f"yours takes {slower:.2f} times as long for {of}; most of it is {TERMS[worst][0]}{near}"
