# SPDX-License-Identifier: Apache-2.0
"""Rank the orders in which a layout's ranks may count along the axes, on a cluster's links."""

import shlex
from collections.abc import Sequence

from estimate.dry_run import aligned, in_units
from mpu.grid import ORDER
from tools.planner.cluster import Cluster
from tools.planner.link_bytes import Choice, Sizes, choices, ledger
from tools.planner.model import REST, Model
from training.config import Config
from training.flags.parse import parse


def config_of(model: Model, cluster: Cluster, flags: str) -> Config:
    """Return the run of a model in the layout of some flags. Raises UsageError."""
    given = shlex.split(flags)
    dtype = [] if {"--bf16", "--fp64"} & set(given) else ["--bf16"]
    rest = [word for word in REST.split() if word != "--bf16"]
    return parse([*model.flags, *rest, *dtype, *given], cluster.gpus)


def orders(config: Config, cluster: Cluster) -> list[Choice]:
    """Return every order that differs for a run, the one whose transfers take least time first."""
    return choices(Sizes.of(config), cluster.levels, ledger(config))


def faster(model: Model, cluster: Cluster, flags: str) -> tuple[str, float]:
    """Return the flag of the best order of a layout, and the seconds of transfers that it saves.

    The flag is empty where no order is faster than the usual one. Seconds are of each axis alone.
    """
    found = orders(config_of(model, cluster, flags), cluster)
    if found[0].order == ORDER:
        return "", 0.0
    usual = next(choice for choice in found if choice.order == ORDER)
    return f"--rank-order {'-'.join(found[0].order)}", usual.total - found[0].total


def table(config: Config, cluster: Cluster) -> list[str]:
    """Return the orders with the bytes of a step over each level, and the flag of the first."""
    found, levels = orders(config, cluster), cluster.levels
    world = config.parallel.world_size
    head = ["order", *(f"over {level.name}" for level in levels), "seconds"]
    rows: list[Sequence[str]] = [head]
    for choice in found:
        sums = [sum(column) for column in zip(*choice.bytes.values(), strict=True)] or [0]
        rows.append([
            "-".join(choice.order), *(in_units(each / world) for each in sums),
            f"{choice.total:.3f}",
        ])  # fmt: skip
    best = found[0]
    parts = sorted(best.seconds.items(), key=lambda part: -part[1])
    told = ", ".join(f"{axis} {seconds:.3f}" for axis, seconds in parts if seconds >= 5e-4)
    return [
        *aligned(rows),
        "bytes that a rank sends in a step, on average; seconds of all transfers, each axis alone "
        "and nothing hidden",
        f"seconds of the first: {told or 'under a millisecond each'}",
        f"flag of the first: --rank-order {'-'.join(best.order)}",
    ]
