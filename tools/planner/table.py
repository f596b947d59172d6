# SPDX-License-Identifier: Apache-2.0
"""Print plans: a ranked table, the flags, one layout against the best term by term, what-ifs."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpu.pipeline import schedules
from mpu.pipeline.simulate import Costs, simulate
from tools.planner.search import Plans
from tools.planner.step_time import Times

ERROR = 0.3  # of a program that was never timed on this device, assumed: docs/planning.md
MOST_ACTIONS = 20_000  # of a schedule that is simulated
TERMS = {  # of Times, as they add up to a step
    "compute": "compute of the slowest stage",
    "exposed": "exposed transfers of tp in it",
    "host": "waiting for the host, and messages",
    "bubble": "the pipeline's ends",
    "sums": "exposed sums of gradients, gathers of weights",
    "update": "the optimizer",
}


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step by TERMS' keys, and which of them is the largest beside compute."""

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
    """Return where the step of a layout goes. Its parts add up to the step."""
    t, m = plans.times, plans.layouts[n].micro_batches
    scale = _jitter(t, plans, n)
    compute, exposed = m * t.compute[n] * scale, m * t.exposed[n] * scale
    bubble = t.bubble[n] * scale
    rest = t.step[n] - compute - exposed - bubble - t.sums[n] - t.update[n] - t.stall[n]
    return Breakdown({
        "compute": compute, "exposed": exposed, "host": max(0.0, rest), "bubble": bubble,
        "sums": t.sums[n], "update": t.update[n],
    })  # fmt: skip


def _jitter(t: Times, plans: Plans, n: int) -> float:
    """Return by what other nodes slow a step."""
    m = plans.layouts[n].micro_batches
    body = t.step[n] - t.sums[n] - t.update[n] - t.stall[n]
    return float(body / (m * t.slot[n] + t.bubble[n]))


def simulated(plans: Plans, n: int) -> float | None:
    """Return the step by the event simulation that --dry-run uses; None where it is too long."""
    each, t = plans.layouts[n], plans.times
    count = each.pp * each.virtual
    if count * each.micro_batches * 3 > MOST_ACTIONS or each.pp == 1:
        return None
    schedule = schedules.build("interleaved" if each.virtual > 1 else "1f1b", each.pp,
                               each.micro_batches, each.virtual)  # fmt: skip
    shares = (1, 2, 1) if each.recompute == "full" else (1, 1, 1)
    own = [float(seconds) / sum(shares) for seconds in t.stages[n][:count]]
    forward, dgrad, wgrad = ([part * seconds for seconds in own] for part in shares)
    timeline = simulate(schedule, Costs(forward, dgrad, wgrad, float(t.message[n]))).timeline
    end = max(spans[-1].end for spans in timeline.ranks)
    return float(end * _jitter(t, plans, n) + t.sums[n] + t.update[n])


def ranking(plans: Plans, top: int, tokens: float) -> list[str]:
    """Return the ranked table of the layouts that fit, and the best one's flags."""
    order = plans.order()
    cluster, m = plans.cluster, plans.model.config.model
    batch = plans.layouts[0].micro_batch * plans.layouts[0].micro_batches * plans.layouts[0].dp
    lines = [
        f"{plans.model.name} on {cluster.gpus:,} GPUs of {cluster.device} ({cluster.nodes} nodes), "
        f"{batch:,} sequences of {m.seq_length:,} tokens: {len(plans.layouts):,} layouts, "
        f"{len(order):,} fit",
    ]
    if not len(order):
        least = int(plans.bytes.argmin())
        need = f"{plans.bytes[least] / 1e9:.1f} GB: {plans.layouts[least].flags()}"
        lines.append(f"none fits {plans.limit / 1e9:.1f} GB; least with {need}")
        return lines
    head = ("tp", "pp", "v", "dp", "b", "m", "zero", "recompute", "step s", "simulated",
            "tokens/s/GPU", "MFU", "GB", "bubble", "exposed", "bound by", "GPU-hours")  # fmt: skip
    rows: list[Sequence[str]] = [head]
    for n in order[:top]:
        each, parts = plans.layouts[n], breakdown(plans, int(n))
        again = simulated(plans, int(n))
        exposed = parts.seconds["exposed"] + parts.seconds["sums"]
        rows.append((
            *map(str, (each.tp, each.pp, each.virtual, each.dp, each.micro_batch,
                       each.micro_batches, each.zero, each.recompute)),
            f"{plans.times.step[n]:.2f} +-{ERROR:.0%}", f"{again:.2f}" if again else "-",
            f"{plans.rate[n]:,.0f}", f"{plans.mfu[n]:.1%}", f"{plans.bytes[n] / 1e9:.1f}",
            f"{parts.seconds['bubble'] / parts.step:.1%}", f"{exposed / parts.step:.1%}",
            parts.bound, f"{tokens / plans.rate[n] / 3600:,.0f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
    lines.append(
        f"GPU-hours are to {tokens:.3g} tokens; {plans.limit / 1e9:.1f} GB of a GPU count on"
    )
    lines.append(f"flags of the first: {command(plans, int(order[0]))}")
    return lines


def command(plans: Plans, n: int) -> str:
    """Return the flags of model and layout; data, learning rate and iterations are the user's."""
    return f"{' '.join(plans.model.flags)} --bf16 {plans.layouts[n].flags()}"


def why(plans: Plans, own: Plans) -> list[str]:
    """Return a layout beside the best one, term by term. own: the plans of that one layout."""
    mine = breakdown(own, 0)
    lines = [f"yours: {own.layouts[0].flags()}"]
    if not own.fits[0]:
        lines.append(f"it needs {own.bytes[0] / 1e9:.1f} GB; {own.limit / 1e9:.1f} GB count on")
    order = plans.order()
    if not len(order):
        return [*lines, "no layout fits, so there is no best one to compare with"]
    best = breakdown(plans, int(order[0]))
    lines.append(f"best:  {plans.layouts[order[0]].flags()}")
    rows: list[Sequence[str]] = [("", "yours s", "best s", "difference")]
    for key, meaning in TERMS.items():
        a, b = mine.seconds[key], best.seconds[key]
        rows.append((meaning, f"{a:.3f}", f"{b:.3f}", f"{a - b:+.3f}"))
    rows.append(("step", f"{mine.step:.3f}", f"{best.step:.3f}", f"{mine.step - best.step:+.3f}"))
    gb = (own.bytes[0] / 1e9, plans.bytes[order[0]] / 1e9)
    rows.append(("memory, GB", f"{gb[0]:.1f}", f"{gb[1]:.1f}", f"{gb[0] - gb[1]:+.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        row[0].ljust(widths[0]) + "  " + "  ".join(map(str.rjust, row[1:], widths[1:]))
        for row in rows
    ]
    worst = max(TERMS, key=lambda key: mine.seconds[key] - best.seconds[key])
    slower = mine.step / best.step
    lines.append(f"yours takes {slower:.2f} times as long; most of it is {TERMS[worst]}")
    return lines


def what_if(base: Plans, other: Plans, asked: str) -> list[str]:
    """Return the best layout of another question beside the best of this one."""
    lines = []
    for name, plans in (("now", base), (asked, other)):
        order = plans.order()
        if not len(order):
            lines.append(f"{name}: no layout fits")
            continue
        n = order[0]
        lines.append(
            f"{name}: {plans.times.step[n]:.2f} s a step, {plans.rate[n]:,.0f} tokens/s/GPU, "
            f"{plans.rate[n] * plans.cluster.gpus:,.0f} tokens/s, {plans.bytes[n] / 1e9:.1f} GB: "
            f"{plans.layouts[n].flags()}"
        )
    return lines
