# SPDX-License-Identifier: Apache-2.0
"""Check how ranks share the sequence: context parallelism's flags, and the size of the world."""

from collections.abc import Iterator
from math import prod
from typing import Any

from mpu.grid import ORDER
from mpu.layers.context_attention import COMM_TYPES
from training.config import Config, ParallelConfig, UsageError

SIZE, COMM = "--context-parallel-size", "--cp-comm-type"
RANKS = "--rank-order"
LEVELS = "--hierarchical-context-parallel-sizes"


def check_world(layout: ParallelConfig) -> None:
    """Refuse a world that does not hold a whole number of model copies."""
    if layout.world_size < 1 or layout.world_size % layout.model_parallel_size:
        sizes = {
            "--tensor-model-parallel-size": layout.tensor_model_parallel_size,
            SIZE: layout.context_parallel_size,
            "--pipeline-model-parallel-size": layout.pipeline_model_parallel_size,
        }
        told = [f"{flag} {n}" for flag, n in sizes.items() if n > 1 or "tensor" in flag]
        copy = " x ".join(told) + f" = {layout.model_parallel_size}" * (len(told) > 1)
        raise UsageError(
            f"WORLD_SIZE {layout.world_size} is not a multiple of {copy}: every copy of the model "
            "needs that many ranks"
        )


def rank_order(text: str) -> str:
    """Return --rank-order as the names of the four axes, fastest first. Raises UsageError."""
    names = [name for name in text.split("-") if name != "ep"]  # Megatron's; there are no experts
    if sorted(names) != sorted(ORDER):
        raise UsageError(
            f"{RANKS} {text}: must name each of {', '.join(ORDER)} once, the fastest first, "
            f"as in {'-'.join(ORDER)}"
        )
    return "-".join(names)


def check(config: Config) -> None:
    """Raise UsageError for a cut of the sequence, or of the heads, that this layout cannot take."""
    m, p = config.model, config.parallel
    cp, kinds = p.context_parallel_size, p.cp_comm_type
    for kind in kinds:
        if kind not in COMM_TYPES:
            raise UsageError(f"{COMM} {kind}: must be among {', '.join(COMM_TYPES)}")
    if len(kinds) not in (1, m.num_layers):
        raise UsageError(
            f"{COMM} has {len(kinds)} values: give one for all layers, or one for each of "
            f"--num-layers {m.num_layers}"
        )
    _sequence(config)
    levels = p.hierarchical_context_parallel_sizes or ()
    told = f"{LEVELS} {' '.join(map(str, levels))}"
    if levels and (len(levels) != 2 or min(levels) < 1 or prod(levels) != cp):
        raise UsageError(
            f"{told}: give two sizes whose product is {SIZE} {cp}, of a group that exchanges heads "
            "(a2a), then how many of those groups make the ring (p2p)"
        )
    if cp == 1:
        return
    if "a2a+p2p" in kinds and not levels:
        raise UsageError(f"{COMM} a2a+p2p needs {LEVELS}: the sizes of its two levels")
    for kind, ranks, by in (("a2a", cp, f"{SIZE} {cp}"), ("a2a+p2p", (*levels, 1)[0], told)):
        if kind in kinds:
            _heads(config, kind, ranks, by)


def _sequence(config: Config) -> None:
    m, p = config.model, config.parallel
    cp, tp = p.context_parallel_size, p.tensor_model_parallel_size
    of = f"--seq-length {m.seq_length} is not a multiple of"
    if m.seq_length % cp:
        raise UsageError(f"{of} {SIZE} {cp}: each rank takes as many tokens")
    if p.sequence_parallel and m.seq_length % (cp * tp):
        by = f"--tensor-model-parallel-size {tp}"
        by = f"{SIZE} {cp} x {by} = {cp * tp}" if cp > 1 else by
        raise UsageError(f"{of} {by}: --sequence-parallel cuts the sequence evenly")


def _heads(config: Config, kind: str, ranks: int, by: str) -> None:
    """Refuse heads that an all-to-all over `ranks` ranks cannot share out."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    over = f" / --tensor-model-parallel-size {tp}" if tp > 1 else ""
    heads, groups = m.num_attention_heads // tp, max(1, m.num_query_groups // tp)
    if heads % ranks:
        raise UsageError(
            f"--num-attention-heads {m.num_attention_heads}{over} is not a multiple of {by}, over "
            f"which {COMM} {kind} cuts them"
        )
    if groups % ranks and ranks % groups:
        raise UsageError(
            f"--num-query-groups {m.num_query_groups}{over} = {groups} and {by}: {COMM} {kind} "
            "needs the one to be a multiple of the other"
        )


def notes(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield a line for each given flag without effect. given: {flag: value}."""
    p = config.parallel
    cp, dp = p.context_parallel_size, p.data_parallel_size
    sizes = (p.tensor_model_parallel_size, cp, dp, p.pipeline_model_parallel_size)
    if RANKS in given and sum(size > 1 for size in sizes) < 2:
        yield f"{RANKS} has nothing to act on: ranks lie along one axis"
    elif min(cp, dp) > 1 and p.rank_order.index("dp") < p.rank_order.index("cp"):
        yield (
            f"{RANKS} {p.rank_order}: gradients are summed over dp and cp in the order of the "
            "ranks, so the bits are not those of an order with cp before dp"
        )
    if LEVELS in given and p.context_parallel_size > 1 and "a2a+p2p" not in p.cp_comm_type:
        yield f"{LEVELS} has nothing to act on without {COMM} a2a+p2p"
