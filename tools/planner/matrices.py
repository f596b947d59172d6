# SPDX-License-Identifier: Apache-2.0
"""Time what an optimizer of full matrices adds to a step: iterations, exchange, passes.

The matrices are those that mpu/optim/owners.py finds in the model's own placements, and so is the
rule by which owners get them; a product costs what the rehearsal's clock computes. Bytes on the
way are those of training/matrices.py: a rank's slices to owners, and updates back, in the dtype of
the iterations. The first bucket's exchange and the last one's way back overlap with nothing.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from mpu.optim.interface import rules_of
from mpu.optim.muon import Muon
from mpu.optim.owners import FullMatrix, evenly, matrices_of
from tools.planner.layout import Layout
from tools.planner.model import Model
from tools.planner.rank_bytes import layer_parameters
from tools.planner.runs import Array, Runs
from tools.planner.step_time import Constants, collective, passes
from tools.rehearsal import roofline
from training.update_rules import optimizer_groups

# bytes that an update reads and writes for a number of a matrix, more than AdamW's does, and
# launches for a parameter: counted in a rehearsal (benchmarks/plan_clocks.py compares)
MORE_BYTES, LAUNCHES = 75, 20


@lru_cache(maxsize=64)
def of_layer(flags: tuple[str, ...], ep: int) -> tuple[FullMatrix, ...]:
    """Return the matrices of a layer of the model; of all its experts."""
    config, found = layer_parameters(flags, 1, ep)
    groups = optimizer_groups(config)
    made: list[FullMatrix] = []
    for name, p in found.items():
        rule = groups[p.entry.group].rule
        if rule.needs_full_matrices:
            made += matrices_of(name, p.place, p.shape, rule.split, p.entry.group)
    return tuple(made)


def muon_of(model: Model) -> Muon | None:
    """Return the model's rule of full matrices, if it has one."""
    rules = rules_of(optimizer_groups(model.config))
    return next((rule for rule in rules if isinstance(rule, Muon)), None)


def seconds(c: Constants, model: Model, found: list[Layout], r: Runs) -> Array:
    """Return what each layout's update takes longer than AdamW's; 0 without such a rule."""
    rule = muon_of(model)
    if rule is None:
        return np.zeros(len(found))
    layers = r.by_rank(r.cut).max(1)
    work, size = np.zeros(len(found)), rule.wire(torch.float32).itemsize
    known: dict[tuple[float, float, int], float] = {}
    for n, e in enumerate(found):
        key = (float(layers[n]), float(r.tp[n] * r.cp[n] * r.dp[n]), min(e.ep, 1))
        if key not in known:
            known[key] = _fullest(c, rule, of_layer(model.flags, key[2]), *key[:2])
        work[n] = known[key]
    own = of_layer(model.flags, min(model.experts, 1))
    members, inner = r.tp * r.cp * r.dp, np.ones(len(r))
    sent, owned = moved(own, layers, r)
    there = collective(c, r, "all_to_all", size * sent, members, inner, calls=layers)
    back = collective(c, r, "all_to_all", size * owned, members, inner, calls=layers)
    one = (there + back) / np.maximum(layers, 1)
    exposed = np.where(members > 1, np.maximum(one, there + back - work), 0.0)
    parameters = len({m.parameter for m in own})
    launched = layers * parameters * LAUNCHES * c["launch_seconds"]
    return work + exposed + np.maximum(passes(c, MORE_BYTES * owned), launched)


def moved(own: Sequence[FullMatrix], layers: Array, r: Runs) -> tuple[Array, Array]:
    """Return the numbers of matrices that a rank sends to owners, and of updates that it gets:
    means over the ranks of a stage. Below ZeRO stage 1 each matrix goes once, and its update to
    all who hold it.
    """
    numbers = layers * sum(m.rows * m.columns for m in own)
    shared = sum(m.rows * m.columns for m in own if m.parts[0].place < 0) * layers  # over tp or ep
    dealt = (numbers - shared) / r.tp + shared
    members = r.tp * r.cp * r.dp
    return numbers / members, np.where(r.zero > 0, dealt / (r.cp * r.dp), dealt)


def _fullest(
    c: Constants, rule: Muon, own: tuple[FullMatrix, ...], layers: float, members: float
) -> float:
    """Return the seconds of the iterations of the owner that has most of so many layers."""
    shapes = [(m.rows, m.columns) for m in own] * int(layers)
    owners = evenly([m.cost for m in own] * int(layers), int(members))
    each = {shape: _iterations(c, rule, *shape) for shape in set(shapes)}
    loads = Counter[int]()
    for owner, shape in zip(owners, shapes, strict=True):
        loads[owner] += each[shape]  # type: ignore[assignment]
    return float(max(loads.values(), default=0.0))


def _iterations(c: Constants, rule: Muon, rows: int, columns: int) -> float:
    """Return the seconds of a matrix' iterations: X X^T, A A and (b A + c A A) X of each."""
    m, n = sorted((rows, columns))
    rate, size = c["peak.bfloat16"] * c["matmul"], 2
    if not rule.bf16:
        rate, size = c["peak.float32"] * c["matmul"], 4
    half = 0.5 if rule.symmetric else 1.0
    parts = ((m, m, n, half), (m, m, m, half), (m, n, m, 1.0))
    one = sum(
        share * float(roofline.matmul(c, a, b, k, rate, size).seconds) for a, b, k, share in parts
    )
    return len(rule.coefficients) * one
