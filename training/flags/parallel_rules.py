# SPDX-License-Identifier: Apache-2.0
"""Check how ranks share the work: world, order, context parallelism, overlap and ZeRO.

A rule raises UsageError before the first collective. A note names a flag that has no effect in this
run, so that none is ignored silently.
"""

from collections.abc import Iterator
from typing import Any

import torch

from mpu.accelerators import unusable_gpu
from training.settings.arguments import ParallelConfig
from training.settings.config import Config, UsageError
from training.settings.pipeline_schedule import micro_batch_counts

SIZE, COMM = "--context-parallel-size", "--cp-comm-type"
RANKS = "--rank-order"
INSTANCES = "--num-distributed-optimizer-instances"
EACH = "--zero-reduce-each-microbatch"
OFFLOAD, STATES = "--optimizer-cpu-offload", "--optimizer-state-offload"
NO_DEVICE = "this process sees no CUDA device"
# Flags without effect if there is a single data-parallel rank.
SHARING = (
    "--use-distributed-optimizer",
    "--zero-stage",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--grad-reduce-in-bf16",
    EACH,
)


class WrongWorldError(UsageError):
    """The world size is not a multiple of `copy`, the number of ranks of one copy of the model."""

    def __init__(self, text: str, copy: int) -> None:
        super().__init__(text)
        self.copy = copy


def check_world(layout: ParallelConfig) -> None:
    """Raise WrongWorldError unless the world holds a whole number of model copies."""
    if layout.world_size < 1 or layout.world_size % layout.model_parallel_size:
        sizes = {
            "--tensor-model-parallel-size": layout.tensor_model_parallel_size,
            SIZE: layout.context_parallel_size,
            "--pipeline-model-parallel-size": layout.pipeline_model_parallel_size,
        }
        sizes_given = [f"{flag} {n}" for flag, n in sizes.items() if n > 1 or "tensor" in flag]
        copy = " x ".join(sizes_given) + f" = {layout.model_parallel_size}" * (len(sizes_given) > 1)
        raise WrongWorldError(
            f"WORLD_SIZE {layout.world_size} is not a multiple of {copy}: every copy of the model "
            "needs that many ranks",
            layout.model_parallel_size,
        )


def check_context(config: Config) -> None:
    """Raise UsageError if the layout cannot divide the sequence, or the heads, evenly."""
    m, p = config.model, config.parallel
    cp, tp = p.context_parallel_size, p.tensor_model_parallel_size
    of = f"--seq-length {m.seq_length} is not a multiple of"
    if m.seq_length % cp:
        raise UsageError(f"{of} {SIZE} {cp}: each rank takes the same number of tokens")
    if p.sequence_parallel and m.seq_length % (cp * tp):
        by = f"--tensor-model-parallel-size {tp}"
        by = f"{SIZE} {cp} x {by} = {cp * tp}" if cp > 1 else by
        raise UsageError(f"{of} {by}: --sequence-parallel cuts the sequence evenly")
    if cp > 1 and p.cp_comm_type == "a2a":
        _heads(config, cp)


def _heads(config: Config, ranks: int) -> None:
    """Raise UsageError if an all-to-all over `ranks` ranks cannot distribute the heads."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    by = f"{SIZE} {ranks}"
    over = f" / --tensor-model-parallel-size {tp}" if tp > 1 else ""
    heads, groups = m.num_attention_heads // tp, max(1, m.num_query_groups // tp)
    if heads % ranks:
        raise UsageError(
            f"--num-attention-heads {m.num_attention_heads}{over} is not a multiple of {by}, over "
            f"which {COMM} a2a cuts them"
        )
    if groups % ranks and ranks % groups:
        raise UsageError(
            f"--num-query-groups {m.num_query_groups}{over} = {groups} and {by}: {COMM} a2a "
            "needs one of them to be a multiple of the other"
        )


def context_notes(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield a line if --rank-order has no effect, or changes bits. given: {flag: value}."""
    p = config.parallel
    cp, dp = p.context_parallel_size, p.data_parallel_size
    sizes = (p.tensor_model_parallel_size, cp, dp, p.pipeline_model_parallel_size)
    if RANKS in given and sum(size > 1 for size in sizes) < 2:
        yield f"{RANKS} has no effect: there is only one axis of ranks"
    elif min(cp, dp) > 1 and p.rank_order.index("dp") < p.rank_order.index("cp"):
        yield (
            f"{RANKS} {p.rank_order}: gradients are summed over dp and cp in the order of the "
            "ranks, so the bits differ from those of an order with cp before dp"
        )


def check_overlap(config: Config) -> None:
    """Raise UsageError for a --tp-comm-overlap that the layout does not support on a GPU."""
    p = config.parallel
    flag, pp = f"--tp-comm-overlap {p.tp_comm_overlap}", p.pipeline_model_parallel_size
    if p.tp_comm_overlap == "symmetric" and pp > 1 and not on_cpu(config):
        raise UsageError(
            f"{flag} with --pipeline-model-parallel-size {pp} needs --device cpu: on a GPU it can "
            "deadlock, as a kernel that waits for a peer's rows may hold the SMs that a pipeline "
            "message to that peer needs; use none, ring or auto (which then takes one of these two)"
        )


def check_device(config: Config) -> None:
    """Raise UsageError if this machine has a GPU that cannot be used and no flag names a device."""
    p = config.parallel
    if p.device is None and not config.run.dry_run and (why := unusable_gpu()):
        raise UsageError(f"{why}; or train on the CPU with --device cpu")


def check_backend(config: Config) -> None:
    """Raise UsageError for --device cuda without a CUDA device."""
    p = config.parallel
    if p.device == "cuda" and not config.run.dry_run and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: {unusable_gpu() or NO_DEVICE}")


def sharers(config: Config) -> str:
    """Return the name, for messages, of the ranks over which gradients are summed."""
    both = config.parallel.context_parallel_size > 1
    return "data- and context-parallel ranks" if both else "data-parallel ranks"


def check_zero(config: Config) -> None:
    """Raise UsageError for flags of ZeRO that contradict each other, the dtype or the layout."""
    p, dtype = config.parallel, config.run.dtype
    level = f"--zero-stage {p.zero}"
    if p.zero_reduce_each_microbatch and p.zero < 2:
        raise UsageError(
            f"{EACH} needs --zero-stage 2 or 3: at {level} every rank keeps all gradients"
        )
    copies, ranks = p.num_distributed_optimizer_instances, p.gradient_ranks
    if ranks % copies:
        raise UsageError(
            f"{INSTANCES} {copies} does not divide the {ranks} {sharers(config)} into equal groups"
        )
    if copies > 1 and not p.zero:
        raise UsageError(
            f"{INSTANCES} {copies} needs --use-distributed-optimizer or --zero-stage: at {level} "
            "every rank has the whole optimizer state"
        )
    if p.main_grads_dtype == "bf16":
        if dtype != torch.bfloat16:
            raise UsageError("--main-grads-dtype bf16 needs --bf16")
        if not p.zero:
            raise UsageError(
                "--main-grads-dtype bf16 needs --use-distributed-optimizer or --zero-stage: at "
                f"{level} there is no owner to keep the sums in fp32"
            )
    if p.optimizer_backend != "torch" and dtype == torch.float64:
        raise UsageError(
            f"--optimizer-backend {p.optimizer_backend} has no fp64: with --fp64 use torch"
        )


def zero_notes(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield lines on given flags without effect, and on limits of a ZeRO stage in this layout.

    given: {flag: value} of the command line; config has been checked.
    """
    p = config.parallel
    overlap = "--overlap-param-gather"
    idle = "has no effect"
    if p.gradient_ranks == 1:
        alone = [name for name in SHARING if given.get(name)]
        if alone:
            verb = "has" if len(alone) == 1 else "have"
            yield f"{', '.join(alone)} {verb} no effect: there is one data-parallel rank"
    elif p.zero and p.shard_size == 1:
        yield (
            f"{INSTANCES} {p.num_distributed_optimizer_instances} leaves groups of one rank: "
            f"--zero-stage {p.zero} shards nothing"
        )
    elif p.zero == 3 and p.pipeline_model_parallel_size > 1:
        yield (
            "--zero-stage 3 in a pipeline: a stage's weights stay gathered from their first use in "
            "a step to the last, so they are sharded only between steps"
        )
    elif p.zero == 3 and not p.overlap_param_gather:
        yield f"--zero-stage 3 without {overlap}: every block waits for its weights"
    if overlap in given and not p.zero:
        yield f"{overlap} {idle} at --zero-stage 0: every rank updates all weights"
    if "--ddp-bucket-size" in given and p.zero == 3:
        yield f"--ddp-bucket-size {idle} at --zero-stage 3: a bucket is a transformer block"
    if p.zero_reduce_each_microbatch and max(micro_batch_counts(config)) == 1:
        yield f"{EACH} {idle}: a step has one micro-batch"
    if p.optimizer_cpu_offload and on_cpu(config):
        yield f"{OFFLOAD} {idle} with --device cpu: the optimizer's state is in host memory already"
    if p.optimizer_state_offload and on_cpu(config):
        yield f"{STATES} with --device cpu copies the state within host memory and saves no memory"


def on_cpu(config: Config) -> bool:
    """Return whether the run computes on the CPU; a dry run without --device means a GPU."""
    device = config.parallel.device
    if device is None and not config.run.dry_run:
        return not torch.cuda.is_available()
    return device == "cpu"
