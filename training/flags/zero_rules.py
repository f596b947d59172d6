# SPDX-License-Identifier: Apache-2.0
"""Check the flags of the sharded optimizer (ZeRO) against each other and against the layout.

A rule raises UsageError before the first collective. A note names a flag that has no effect in this
run, so that none is ignored silently.
"""

from collections.abc import Iterator
from typing import Any

import torch

from mpu.zero.layout import ZeroConfig
from training.config import Config, UsageError
from training.schedule import micro_batch_counts

INSTANCES = "--num-distributed-optimizer-instances"
EACH = "--zero-reduce-each-microbatch"
OFFLOAD = "--optimizer-cpu-offload"
# Flags without effect where there is a single data-parallel rank.
SHARING = (
    "--use-distributed-optimizer",
    "--zero-stage",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--grad-reduce-in-bf16",
    EACH,
)


def zero_config(config: Config) -> ZeroConfig:
    """Return how the flags share gradients and weights among data-parallel ranks."""
    p = config.parallel
    return ZeroConfig(
        zero_stage=p.zero,
        bucket_size=p.ddp_bucket_size or 0,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        reduce_each_micro_batch=p.zero_reduce_each_microbatch,
        grad_reduce_dtype=torch.bfloat16 if p.grad_reduce_in_bf16 else None,
        main_grads_dtype=torch.bfloat16 if p.main_grads_dtype == "bf16" else None,
        keep_unsharded=p.pipeline_model_parallel_size > 1,
    )


def sharers(config: Config) -> str:
    """Return what the ranks are called over which gradients are summed."""
    both = config.parallel.context_parallel_size > 1
    return "data- and context-parallel ranks" if both else "data-parallel ranks"


def check(config: Config) -> None:
    """Raise UsageError for flags that contradict each other or the layout."""
    p, dtype = config.parallel, config.run.dtype
    level = f"--zero-stage {p.zero}"
    if p.zero_stage == 0 and p.use_distributed_optimizer:
        raise UsageError(
            "--zero-stage 0 and --use-distributed-optimizer exclude each other: the latter is "
            "--zero-stage 1"
        )
    if p.zero_reduce_each_microbatch:
        if p.zero < 2:
            raise UsageError(
                f"{EACH} needs --zero-stage 2 or 3: at {level} whole gradients stay on every rank"
            )
        if p.pipeline_model_parallel_size > 1:
            raise UsageError(
                f"{EACH} needs --pipeline-model-parallel-size 1, not "
                f"{p.pipeline_model_parallel_size}: in a pipeline micro-batches interleave"
            )
    copies, ranks = p.num_distributed_optimizer_instances, p.gradient_ranks
    if ranks % copies:
        raise UsageError(
            f"{INSTANCES} {copies} does not divide the {ranks} {sharers(config)} into groups of "
            "one size"
        )
    if copies > 1 and not p.zero:
        raise UsageError(
            f"{INSTANCES} {copies} needs --use-distributed-optimizer or --zero-stage: at {level} "
            "every rank has all of the optimizer"
        )
    if p.main_grads_dtype == "bf16":
        if dtype != torch.bfloat16:
            raise UsageError("--main-grads-dtype bf16 needs --bf16")
        if not p.zero:
            raise UsageError(
                "--main-grads-dtype bf16 needs --use-distributed-optimizer or --zero-stage: at "
                f"{level} there is no owner to keep the sums in fp32"
            )
    if p.optimizer_backend != "torch":
        backend = f"--optimizer-backend {p.optimizer_backend}"
        if p.device == "cpu":
            raise UsageError(f"{backend} needs --device cuda; on a CPU use torch")
        if dtype == torch.float64:
            raise UsageError(f"{backend} has no fp64: with --fp64 use torch")
        if p.optimizer_cpu_offload:
            raise UsageError(f"{backend} with {OFFLOAD}: the host updates, so use torch")


def notes(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield a line for each given flag without effect, and for what a ZeRO stage cannot do here.

    given: {flag: value} of the command line; config has been checked.
    """
    p = config.parallel
    overlap = "--overlap-param-gather"
    idle = "has nothing to act on"
    if p.gradient_ranks == 1:
        alone = [name for name in SHARING if given.get(name)]
        if alone:
            verb = "has" if len(alone) == 1 else "have"
            yield f"{', '.join(alone)} {verb} nothing to act on: there is one data-parallel rank"
    elif p.zero and p.shard_size == 1:
        yield (
            f"{INSTANCES} {p.num_distributed_optimizer_instances} leaves groups of one rank: "
            f"--zero-stage {p.zero} shards nothing"
        )
    elif p.zero == 3 and p.pipeline_model_parallel_size > 1:
        yield (
            "--zero-stage 3 in a pipeline: a stage's weights stay whole from their first use in a "
            "step to the last, so they are sharded only between steps"
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


def on_cpu(config: Config) -> bool:
    """Return whether the run computes on the CPU; a dry run without --device means a GPU."""
    device = config.parallel.device
    if device is None and not config.run.dry_run:
        return not torch.cuda.is_available()
    return device == "cpu"
