# SPDX-License-Identifier: Apache-2.0
"""Print plans: a ranked table, the flags, one layout against the best term by term, what-ifs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpu.pipeline import schedules
from mpu.pipeline.simulate import Costs, Timeline, simulate
from tools.planner.layout import Layout
from tools.planner.rank_order import faster
from tools.planner.search import COMPARISON_ERROR, Plans
from training.text import aligned

ERROR = 0.3  # of a program that was never timed on this device, assumed: docs/planning.md
MILLION = 1_000_000
MOST_ACTIONS = 20_000  # of a schedule that is simulated
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
AXES = ("tp", "cp", "ep", "pp", "dp")  # of TERMS: what nothing hides
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

    @property
    def bound(self) -> str:
        """Return what a step is bound by: compute where it is over half, else the next term."""
        rest = {key: value for key, value in self.seconds.items() if key != "compute"}
        largest = max(rest, key=lambda key: rest[key])
        return "compute" if self.seconds["compute"] > self.step / 2 else largest


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


def timeline(plans: Plans, n: int, micro_batches: int) -> Timeline:
    """Return what each pipeline rank does when in a step of so many micro-batches, simulated."""
    each, t = plans.layouts[n], plans.times
    schedule = schedules.build(
        each.schedule, each.pp, micro_batches, each.virtual, overlaps=each.overlap_ep
    )
    shares = (1.0, 1.0 + float(plans.runs.recompute[n]), 1.0)
    own = [float(seconds) / sum(shares) for seconds in t.stages[n][: each.pp * each.virtual]]
    forward, dgrad, wgrad = ([part * seconds for seconds in own] for part in shares)
    return simulate(schedule, Costs(forward, dgrad, wgrad, float(t.message[n]))).timeline


def simulated(plans: Plans, n: int) -> float | None:
    """Return the step by the event simulation that --dry-run uses; None where it is too long."""
    each, t = plans.layouts[n], plans.times
    if each.pp * each.virtual * each.micro_batches * 3 > MOST_ACTIONS or each.pp == 1:
        return None
    end = max(spans[-1].end for spans in timeline(plans, n, each.micro_batches).ranks)
    return float(end * float(t.jitter[n]) + t.sums[n] + t.update[n] + t.carried[n])


def ranking(plans: Plans, top: int, tokens: float) -> list[str]:
    """Return the ranked table of the layouts that fit, and the best one's flags."""
    cluster, m = plans.cluster, plans.model.config.model
    batch = plans.layouts[0].micro_batch * plans.layouts[0].micro_batches * plans.layouts[0].dp
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}"
    lines = [
        f"{plans.model.name} on {cluster.gpus:,} GPUs of {cluster.device} ({nodes}), "
        f"{batch:,} sequences of {m.seq_length:,} tokens: {len(plans.layouts):,} layouts, "
        f"{int(plans.fits.sum()):,} fit",
    ]
    best = plans.best(top)
    if not best:
        least = int(plans.bytes.argmin())
        need = f"{plans.bytes[least] / 1e9:.1f} GB: {plans.layouts[least].flags()}"
        lines.append(f"none fits {plans.limit / 1e9:.1f} GB; least with {need}")
        return lines
    dealt = ("ep",) * (plans.model.experts > 0)
    head = ("", "tp", "cp", *dealt, "pp", "stages", "schedule", "dp", "b", "m", "zero", "recompute",
            "overlap", "dtype", "step s", "simulated", "tokens/s/GPU", "MFU", "GB", "bubble",
            "exposed", "bound by", "GPU-hours")  # fmt: skip
    lines.append(
        "stages: of a rank; b: sequences of a micro-batch; m: micro-batches of a step; zero: ZeRO "
        "stage; recompute: what backward runs again; overlap: how tp's transfers travel; step s: "
        "by formulas; simulated: the same by playing each action of the pipeline; GB: of the "
        "fullest rank; exposed: transfers that nothing hides"
    )
    rows: list[Sequence[str]] = [head]
    for number, n in enumerate(best, 1):
        each, parts = plans.layouts[n], breakdown(plans, n)
        again = simulated(plans, n)
        exposed = sum(parts.seconds[axis] for axis in AXES)
        rows.append((
            str(number), str(each.tp), f"{each.cp} {each.comm}" if each.cp > 1 else "1",
            *(experts_of(each) for _ in dealt),
            *map(str, (each.pp, each.virtual)), each.schedule if each.pp > 1 else "-",
            *map(str, (each.dp, each.micro_batch, each.micro_batches, each.zero)),
            activations_of(each),
            each.overlap, each.dtype,
            f"{plans.times.step[n]:.2f} +-{ERROR:.0%}", f"{again:.2f}" if again else "-",
            f"{plans.rate[n]:,.0f}", f"{plans.mfu[n]:.1%}", f"{plans.exact(n) / 1e9:.1f}",
            f"{parts.seconds['bubble'] / parts.step:.1%}", f"{exposed / parts.step:.1%}",
            parts.bound, f"{tokens / plans.rate[n] / 3600:,.0f}",
        ))  # fmt: skip
    lines += [*aligned(rows), *variants_of(plans, top)]
    lines += [*parts_of(plans, best), *edges_of(plans, best)]
    lines.append(
        f"GPU-hours: for {tokens:.3g} tokens, +-{ERROR:.0%}; GB: as in --dry-run, of "
        f"{plans.limit / 1e9:.1f} available on a GPU"
    )
    order, saved = faster(plans.model, cluster, plans.layouts[best[0]].flags())
    if order:
        lines.append(
            f"{order}: its transfers take {saved:.3f} s less than in the usual order, if nothing "
            "hides them; step s does not count that"
        )
    lines.append(f"flags of the first: {plans.command(best[0])} {order}".rstrip())
    return lines


VARIED = {  # of a row's layouts: what differs, and how a table calls it
    "tp": "tp", "cp": "cp", "pp": "pp", "virtual": "stages", "schedule": "schedule",
    "micro_batch": "b", "zero": "zero", "overlap": "overlap",
}  # fmt: skip


def variants_of(plans: Plans, top: int) -> list[str]:
    """Return, for each row, which layouts it represents."""
    lines = [
        f"variants (layouts within {COMPARISON_ERROR:.1%} of the fastest of a row, which is the "
        "error of a comparison; the row has the one that relies on the fewest mechanisms)"
    ]
    for number, row in enumerate(plans.rows(top), 1):
        each = [plans.layouts[n] for n in row.members]
        found_lines = []
        for name, word in VARIED.items():
            found = sorted({getattr(e, name) for e in each})
            found_lines.append(f"{word} {'/'.join(map(str, found))}")
        if plans.model.experts:
            found_lines.append(f"ep {'/'.join(sorted({experts_of(e) for e in each}))}")
        found_lines.append(f"recompute {'/'.join(sorted({activations_of(e) for e in each}))}")
        fastest = plans.layouts[row.fastest].flags()
        lines.append(f"{number}  {len(each)}: {', '.join(found_lines)}")
        if row.fastest != row.first:
            lines.append(f"   fastest, {plans.times.step[row.fastest]:.2f} s: {fastest}")
    return lines


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


def activations_of(each: Layout) -> str:
    """Return what becomes of activations, recomputed or put in host memory, and whether the
    optimizer's state is there.
    """
    if each.offload:
        return "offload"
    kind = f"{each.again} a stage" if each.recompute == "block" else each.recompute
    return f"{kind}+state" if each.states else kind


def experts_of(each: Layout) -> str:
    """Return how many ranks experts are dealt out over, and whether exchanges are overlapped."""
    return f"{each.ep} overlapped" if each.overlap_ep else str(each.ep)


def work_of(plans: Plans, n: int) -> tuple[str, str, str]:
    """Return what a layout's step does: its batch, its sequences, the dtype of its matmuls."""
    each = plans.layouts[n]
    batch = each.micro_batch * each.micro_batches * each.dp
    return f"{batch:,} sequences", f"{plans.model.config.model.seq_length:,} tokens", each.dtype


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


def what_if(base: Plans, other: Plans, question: str) -> list[str]:
    """Compare the best layout of another question with the best of this one."""
    lines = []
    for name, plans in (("now", base), (question, other)):
        found = plans.best(1)
        if not found:
            lines.append(f"{name}: no layout fits")
            continue
        n = found[0]
        lines.append(
            f"{name}: {plans.times.step[n]:.2f} s a step, {plans.rate[n]:,.0f} tokens/s/GPU, "
            f"{plans.rate[n] * plans.cluster.gpus:,.0f} tokens/s, {plans.exact(n) / 1e9:.1f} GB: "
            f"{plans.layouts[n].flags()}"
        )
    return lines
