# SPDX-License-Identifier: Apache-2.0
"""Print plans: a ranked table, the command, one layout against the best term by term."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tools.planner.layout import Layout
from tools.planner.measured import Measured
from tools.planner.rank_order import faster
from tools.planner.search import COMPARISON_ERROR, RISK, Plans
from training.text import aligned

ERROR = 0.3  # of a program that was never timed on this device, assumed: docs/planning.md
MILLION = 1_000_000
COLUMNS = 100
EXAMPLE = "--mock-data --lr 3e-4 --train-iters 20"
TERMS = {  # of Times, as they add up to a step
    "compute": "compute of the slowest stage",
    "tp": "exposed transfers of tp",
    "cp": "exposed transfers of cp",
    "ep": "transfers of tokens to experts and back",
    "pp": "messages between stages that are waited for",
    "dp": "exposed sums of gradients, gathers of weights",
    "copies": "exposed copies to and from the host",
    "host": "waiting for the host",
    "bubble": "the pipeline's ends",
    "update": "the optimizer",
}
KINDS = {  # of the table: kinds of memory as --dry-run names them
    "parameters": ("parameters", "gathered weights"),
    "gradients": ("gradients", "unsharded gradients"),
    "optimizer": ("masters", "moments"),
    "activations": ("activations", "messages"),
    "logits": ("logits",),
    "working memory": ("working memory", "workspaces", "other state"),
}


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step by TERMS' keys, and which of them is the largest besides compute."""

    seconds: dict[str, float]

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


def breakdown(plans: Plans, n: int) -> Breakdown:
    """Return where the step of a layout goes. Its parts add up to the step, to rounding."""
    t, each = plans.times, plans.layouts[n]
    scale = float(t.jitter[n])
    many = each.micro_batches * scale
    ends = 2 * (each.pp - 1) * float(t.message[n]) * scale  # of the bubble: messages
    seconds = {
        "compute": many * t.compute[n], "tp": many * t.tp[n], "cp": many * t.cp[n],
        "ep": many * t.ep[n],
        "pp": many * t.waits[n] + ends, "dp": many * t.fsdp[n] + t.sums[n],
        "copies": many * t.copies[n] + t.carried[n], "host": many * t.host[n],
        "bubble": t.bubble[n] * scale - ends, "update": t.update[n],
    }  # fmt: skip
    return Breakdown({key: float(seconds[key]) for key in TERMS})


def ranking(
    plans: Plans, best: Sequence[int], tokens: float, results: Mapping[str, Measured]
) -> list[str]:
    """Return the table of layouts, and the first one's command. results: what was measured."""
    cluster, m = plans.cluster, plans.model.config.model
    batch = batch_of(plans.layouts[0])
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}"
    ranks = "CPU ranks" if cluster.cpu else f"GPUs of {cluster.device}"
    lines = [
        f"{plans.model.name} on {cluster.gpus:,} {ranks} ({nodes}), "
        f"{batch:,} sequences of {m.seq_length:,} tokens: {len(plans.layouts):,} layouts, "
        f"{int(plans.fits.sum()):,} fit",
    ]
    known = {n: results[flags] for n in best if (flags := plans.layouts[n].flags()) in results}
    if not best:
        least = int(plans.bytes.argmin())
        need = f"{plans.bytes[least] / 1e9:.1f} GB: {plans.layouts[least].flags()}"
        lines.append(f"none fits {plans.limit / 1e9:.1f} GB; least with {need}")
        return lines
    rows: list[Sequence[str]] = [
        ("", *["measured"] * bool(known), "step s", "tokens/s/GPU", "MFU", "GPU-hours", "GB",
         "free")
    ]  # fmt: skip
    tight = False
    for number, n in enumerate(best, 1):
        left = (plans.limit - plans.exact(n)) / plans.memory
        tight |= left < RISK
        rows.append((
            str(number), *[measured_of(plans, n, known.get(n))] * bool(known),
            f"{plans.times.step[n]:.2f}", f"{plans.rate[n]:,.0f}",
            f"{plans.mfu[n]:.1%}", f"{tokens / plans.rate[n] / 3600:,.0f}",
            f"{plans.exact(n) / 1e9:.1f}", f"{left:.0%}" + "!" * (left < RISK),
        ))  # fmt: skip
    doubt = f"+-{ERROR:.0%}"
    if cluster.cpu:
        doubt = "those of a core that is assumed, so --measure layouts that matter to you"
    texts = ["layout", *(described(plans, n) for n in best)]
    for row, text in zip(aligned(rows), texts, strict=True):
        first, *rest = textwrap.wrap(text, COLUMNS - len(row) - 2)
        lines += [f"{row}  {first}", *(" " * (len(row) + 2) + part for part in rest)]
    lines.append(
        f"Seconds, tokens, MFU and GPU-hours (for {tokens:.3g} tokens) are computed, and were "
        f"measured by nobody: {doubt}. GB is what --dry-run says; free: of "
        f"{plans.memory / 1e9:.0f} GB, after what context and libraries take. dp, and sequences of "
        "a micro-batch (b), are of the layout."
    )
    if known:
        lines.append(
            "measured: tokens/s/GPU of a run on your ranks, the median of its steps, and how far "
            "that is from what is computed"
        )
    lines += [
        f"{number} failed: {known[n].error}" for number, n in enumerate(best, 1)
        if n in known and known[n].error
    ]  # fmt: skip
    if tight:
        lines.append(
            f"!: less than {RISK:.0%} of a GPU is left, which fragments of the allocator or a "
            "longer sequence can take: a risk"
        )
    lines += [*parts_of(plans, best), *edges_of(plans, best)]
    order, saved = faster(plans.model, cluster, plans.layouts[best[0]].flags())
    if order:
        lines.append(
            f"{order}: its transfers take {saved:.3f} s less than in the usual order, if nothing "
            "hides them; step s does not count that"
        )
    lines.append(f"The first, with {EXAMPLE} as an example of what is yours to choose:")
    return [*lines, *command_lines(plans, best[0], order)]


def measured_of(plans: Plans, n: int, run: Measured | None) -> str:
    """Return what a layout's run did: its rate, and the difference from what is computed."""
    if run is None or run.error:
        return "failed" if run else "-"
    rate = run.tokens_per_second / plans.cluster.gpus
    return f"{rate:,.0f} ({rate / plans.rate[n] - 1:+.0%})"


def wrapped(line: str) -> list[str]:
    """Return a line of text in lines of at most COLUMNS; a command's are cut already."""
    if len(line) <= COLUMNS or " \\\n" in line or "   " in line:
        return [line]
    return textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)


def described(plans: Plans, n: int) -> str:
    """Return a layout in words: "tp 8 ring, pp 4 x 2, dp 2, b 1, ZeRO 1, recompute full"."""
    e = plans.layouts[n]
    words = [f"tp {e.tp}" + f" {e.overlap}" * (e.overlap != "none")]
    words += [f"cp {e.cp} {e.comm}"] * (e.cp > 1)
    words += [f"ep {experts_of(e)}"] * (e.ep > 0)
    if e.pp > 1:
        named = "" if e.schedule in ("1f1b", "interleaved") else f" {e.schedule}"
        words.append(f"pp {e.pp}" + (f" x {e.virtual}" * (e.virtual > 1 and not named)) + named)
    words += [f"dp {e.dp}", f"b {e.micro_batch}"] + [f"ZeRO {e.zero}"] * (e.zero > 0)
    return ", ".join([*words, *activations_of(e), *[e.dtype] * (e.dtype != "bf16")])


def activations_of(e: Layout) -> list[str]:
    """Return what becomes of activations and of the optimizer's state, in words."""
    again = f"{e.again} layers a stage" if e.recompute == "block" else e.recompute
    words = [f"recompute {again}"] * (again != "none")
    words += ["activations in host memory"] * e.offload
    words += ["optimizer's state in host memory"] * e.states
    return words + ["update on the host"] * e.on_host


def command_lines(plans: Plans, n: int, more: str = "") -> list[str]:
    """Return the command that starts a layout, in lines of a shell."""
    cluster = plans.cluster
    start = "torchrun --standalone"
    if cluster.nodes > 1:
        start = f"torchrun --nnodes {cluster.nodes} --node-rank $NODE --master-addr $HOST"
    words = f"{plans.command(n)} {more} {EXAMPLE}".split()
    lines = [f"{start} --nproc-per-node {cluster.node} pretrain_llama.py"]
    line = ""
    for word in words:
        if len(line) + len(word) > COLUMNS - 6 and word.startswith("--"):
            lines, line = [*lines, line], ""
        line += f" {word}"
    lines.append(line)
    return [" \\\n ".join(lines)]


def by_kind(plans: Plans, n: int) -> list[float]:
    """Return the GB of a layout's fullest rank in the order of KINDS."""
    kinds = plans.fullest(n)
    return [sum(kinds.get(name, 0.0) for name in names) / 1e9 for names in KINDS.values()]


def parts_of(plans: Plans, best: Sequence[int]) -> list[str]:
    """Return, for each layout, the parts of its step and its fullest rank's memory by kind."""
    steps, memory = [("", *TERMS)], [("", *KINDS)]
    for number, n in enumerate(best, 1):
        parts = breakdown(plans, n)
        shares = [f"{seconds / parts.step:.1%}" for seconds in parts.seconds.values()]
        steps.append((str(number), *shares))
        memory.append((str(number), *(f"{gb:.2f}" for gb in by_kind(plans, n))))
    meanings = "; ".join(f"{key}: {meaning}" for key, meaning in TERMS.items())
    return [
        f"parts of the step ({meanings})", *aligned(steps),
        "GB of the fullest pipeline rank at its peak", *aligned(memory),
    ]  # fmt: skip


def edges_of(plans: Plans, best: Sequence[int]) -> list[str]:
    """Return, for each layout, how far it is from the edges of its device and of its host."""
    rows: list[Sequence[str]] = [("", "GB left", "%", "host GB left", "%", "host busy")]
    host = plans.cluster.host
    for number, n in enumerate(best, 1):
        left, there = plans.limit - plans.exact(n), host - plans.in_host(n)
        offloaded = (f"{there / 1e9:,.1f}", f"{there / host:.1%}") if plans.in_host(n) else "--"
        share = f"{plans.times.host_share[n]:.0%}"
        rows.append(
            (str(number), f"{left / 1e9:.1f}", f"{left / plans.memory:.1%}", *offloaded, share)
        )
    return [
        f"margins (GB left: of the {plans.limit / 1e9:.1f} GB available to a plan, and % of "
        f"the device's {plans.memory / 1e9:.1f}; host GB left: of the {host / 1e9:,.0f} of a node "
        "that offloaded activations and state may take; host busy: what the host needs to launch "
        "the slowest stage, over that stage's time: above 100% the GPU waits)",
        *aligned(rows),
    ]  # fmt: skip


def experts_of(each: Layout) -> str:
    """Return how many ranks experts are dealt out over, and whether exchanges are overlapped."""
    return f"{each.ep} overlapped" if each.overlap_ep else str(each.ep)


def work_of(plans: Plans, n: int) -> tuple[str, str, str]:
    """Return what a layout's step does: its batch, its sequences, the dtype of its matmuls."""
    each = plans.layouts[n]
    length = f"{plans.model.config.model.seq_length:,} tokens"
    return f"{batch_of(each):,} sequences", length, each.dtype


def batch_of(each: Layout) -> int:
    """Return the sequences of a layout's step."""
    return each.micro_batch * each.micro_batches * each.dp


def describe_work(question: tuple[str, str, str]) -> str:
    return "{} of {}, matmuls in {}".format(*question)


def why(plans: Plans, own: Plans, uncounted: Sequence[str] = ()) -> list[str]:
    """Compare a layout with the best one, term by term.

    own: the plans of that one layout. uncounted: what its flags say that the planner does not
    count. Seconds are of a step where both do the same work, and of MILLION tokens where they do
    not; a line states which, and what differs.
    """
    lines = [f"yours: {own.layouts[0].flags()}"]
    if uncounted:
        lines.append(f"not counted: {'; '.join(uncounted)}")
    if not own.fit(0):
        lines.append(f"it needs {own.exact(0) / 1e9:.1f} GB of {own.limit / 1e9:.1f} GB available")
    lines += edges_of(own, [0])
    found = plans.best(1)
    if not found:
        return [*lines, "no layout fits, so there is no best one to compare with"]
    n = found[0]
    lines.append(f"best:  {plans.layouts[n].flags()}")
    both = work_of(own, 0), work_of(plans, n)
    where = f"on {own.cluster.gpus:,} GPUs of {own.cluster.device}"
    yours, best = (
        {**breakdown(p, at).seconds, "step": float(p.times.step[at])}
        for p, at in ((own, 0), (plans, n))
    )
    if both[0] == both[1]:
        unit = "s"
        lines.append(f"seconds of a step: {describe_work(both[0])}, {where}, yours and best alike")
    else:
        unit = "s/Mtoken"
        lines.append(
            f"seconds of {MILLION:,} tokens, as the two do different work {where}: yours "
            f"{describe_work(both[0])}; best {describe_work(both[1])}"
        )
        yours = {key: value * MILLION / own.runs.tokens[0] for key, value in yours.items()}
        best = {key: value * MILLION / plans.runs.tokens[n] for key, value in best.items()}
    digits = 3 + max(0, -int(np.floor(np.log10(min(yours["step"], best["step"])))))
    rows: list[Sequence[str]] = [("", f"yours {unit}", f"best {unit}", "difference")]
    for key, meaning in {**TERMS, "step": "step" if unit == "s" else "sum"}.items():
        a, b = yours[key], best[key]
        rows.append((meaning, *(f"{x:.{digits}f}" for x in (a, b)), f"{a - b:+.{digits}f}"))
    gb = (own.exact(0) / 1e9, plans.exact(n) / 1e9)
    rows.append(("memory, GB", f"{gb[0]:.1f}", f"{gb[1]:.1f}", f"{gb[0] - gb[1]:+.1f}"))
    for title, a, b in zip(KINDS, by_kind(own, 0), by_kind(plans, n), strict=True):
        rows.append((f"  {title}", f"{a:.1f}", f"{b:.1f}", f"{a - b:+.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        row[0].ljust(widths[0]) + "  " + "  ".join(map(str.rjust, row[1:], widths[1:]))
        for row in rows
    ]
    return [*lines, verdict(yours, best, "a step" if unit == "s" else "a token")]


def verdict(yours: dict[str, float], best: dict[str, float], of: str) -> str:
    """Return in a sentence how two layouts compare, and by which term most."""
    slower = yours["step"] / best["step"]
    gap = {key: yours[key] - best[key] for key in TERMS}
    worst = max(gap, key=lambda key: abs(gap[key]))
    if abs(gap[worst]) < 1e-9 * best["step"]:
        return f"yours takes as long as the best for {of}"
    close = bool(abs(slower - 1) <= COMPARISON_ERROR)
    near = f"; that is within the error of a comparison, {COMPARISON_ERROR:.0%}" * close
    return f"yours takes {slower:.2f} times as long for {of}; most of it is {TERMS[worst]}{near}"
