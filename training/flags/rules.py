# SPDX-License-Identifier: Apache-2.0
"""Check the flags against each other: what must divide what, and what excludes what.

Each rule raises UsageError with the flag, its value and the rule. No rule writes a file or waits
for another rank, so a mistake is reported before the first collective.
"""

from collections.abc import Iterator
from typing import Any

from mpu.pipeline.schedules import SPLIT
from training.flags import (
    compute_rules,
    expert_rules,
    flag_table,
    parallel_rules,
    run_rules,
    size_rules,
)
from training.settings import pipeline_schedule
from training.settings.config import Config, UsageError
from training.settings.setting import Setting

# Pairs of flags of which only one may be given.
EXCLUDE = (
    ("--train-iters", "--train-samples"),
    ("--bf16", "--fp64"),
    ("--grad-reduce-in-bf16", "--fp64"),
    ("--main-grads-dtype", "--fp64"),
    ("--global-batch-size", "--step-batch-size-schedule"),
    ("--mock-data", "--data-path"),
    ("--mock-data", "--data-args-path"),
    ("--data-path", "--data-args-path"),
    ("--train-data-path", "--data-args-path"),
    ("--valid-data-path", "--data-args-path"),
    ("--test-data-path", "--data-args-path"),
    ("--mock-data", "--train-data-path"),
    ("--data-path", "--train-data-path"),
    ("--data-path", "--valid-data-path"),
    ("--data-path", "--test-data-path"),
    ("--split", "--train-data-path"),
    *(
        ("--data-stages", other)
        for other in (
            "--mock-data",
            "--data-path",
            "--data-args-path",
            "--train-data-path",
            "--split",
        )
    ),
    ("--train-iters", "--lr-decay-samples"),
    ("--train-iters", "--lr-wsd-decay-samples"),
    ("--train-iters", "--lr-warmup-samples"),
    ("--train-samples", "--lr-decay-iters"),
    ("--train-samples", "--lr-wsd-decay-iters"),
    ("--train-samples", "--lr-warmup-iters"),
    ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
    ("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"),
    ("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"),
    ("--pipeline-model-parallel-layout", "--decoder-last-pipeline-num-layers"),
    ("--pipeline-model-parallel-layout", "--account-for-embedding-in-pipeline-split"),
    ("--pipeline-model-parallel-layout", "--account-for-loss-in-pipeline-split"),
    ("--num-layers-per-virtual-pipeline-stage", "--decoder-first-pipeline-num-layers"),
    ("--num-layers-per-virtual-pipeline-stage", "--decoder-last-pipeline-num-layers"),
    ("--decoder-first-pipeline-num-layers", "--account-for-embedding-in-pipeline-split"),
    ("--decoder-first-pipeline-num-layers", "--account-for-loss-in-pipeline-split"),
    ("--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split"),
    ("--decoder-last-pipeline-num-layers", "--account-for-loss-in-pipeline-split"),
    ("--branch-from", "--pretrained-checkpoint"),
    ("--lr-warmup-fraction", "--lr-warmup-iters"),
    ("--lr-warmup-fraction", "--lr-warmup-samples"),
    ("--use-megatron-fsdp", "--zero-stage"),
    ("--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler"),
    ("--use-checkpoint-opt-param-scheduler", "--override-opt_param-scheduler"),
)
ACCUMULATE = "--accumulate-allreduce-grads-in-fp32"


def check_given(given: dict[str, Any]) -> None:
    """Refuse a command line that lacks a required flag or gives two that exclude each other."""
    required = [flag.name for flag in flag_table.live() if flag.row.required]
    if missing := [name for name in required if name not in given]:
        one = "is missing: it has" if len(missing) == 1 else "are missing: they have"
        raise UsageError(f"{', '.join(missing)} {one} no default")
    if "--train-iters" not in given and "--train-samples" not in given:
        raise UsageError("--train-iters or --train-samples is missing: give one of them")
    for one, other in EXCLUDE:
        # An off-value (0 steps of warm-up) excludes nothing.
        if given.get(one) not in (None, 0, ()) and given.get(other) not in (None, 0, ()):
            raise UsageError(f"{one} and {other} exclude each other: give one of them")
    on_nan = given.get("--on-nan", "skip")
    if on_nan != "skip" and "--no-check-for-nan-in-loss-and-grad" in given:
        raise UsageError(
            f"--on-nan {on_nan} and --no-check-for-nan-in-loss-and-grad contradict each other: the "
            "latter is --on-nan skip"
        )
    if given.get("--main-grads-dtype") == "bf16" and ACCUMULATE in given:
        raise UsageError(f"--main-grads-dtype bf16 and {ACCUMULATE} contradict each other")
    expert_rules.check_given(given)
    heads, hidden = given["--num-attention-heads"], given["--hidden-size"]
    if "--kv-channels" not in given and hidden % heads:
        raise UsageError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: "
            "choose a multiple, or give the head size as --kv-channels"
        )
    by_hand, steps = given.get("--muon-coefficients"), given.get("--muon-num-ns-steps")
    if by_hand and steps not in (None, len(by_hand)):
        raise UsageError(
            f"--muon-num-ns-steps {steps} with --muon-coefficients of {len(by_hand)} steps: they "
            "must agree"
        )
    groups = given.get("--num-query-groups", heads)
    if groups != heads and "--group-query-attention" not in given:
        raise UsageError(
            f"--num-query-groups {groups} needs --group-query-attention, without which Megatron-LM "
            "ignores it"
        )


def idle(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield a line for each given flag that has no effect."""
    for flag in flag_table.live():
        row = flag.row
        if flag.name in given and not _acts(row, given, config):
            value = f" {row.needs_value}" if row.needs_value else ""
            yield f"{flag.name} has no effect without {row.needs[0]}{value}"
    for name in ("--finetune", "--no-load-optim"):
        if name in given and "--use-checkpoint-opt-param-scheduler" in given:
            yield f"--use-checkpoint-opt-param-scheduler has no effect with {name}"
    deferring, schedule = "--defer-embedding-wgrad-compute", given.get("--pipeline-schedule")
    if deferring in given and schedule in SPLIT:
        yield f"{deferring} has no effect: {schedule} defers every weight gradient"


def _acts(row: Setting, given: dict[str, Any], config: Config) -> bool:
    """Return whether a flag that the setting needs is given, or has the value that it needs."""
    if not row.needs_value:
        return not row.needs or bool(given.keys() & set(row.needs))
    flag = flag_table.known_flags()[row.needs[0]]
    value = getattr(getattr(config, flag.section), flag.dest)
    return bool(value == row.needs_value) and _acts(flag.row, given, config)


def check(config: Config) -> None:
    """Raise UsageError where a whole config breaks a rule; the first that is broken is reported."""
    parallel_rules.check_device(config)
    size_rules.check(config)
    size_rules.check_micro_batch(config)
    size_rules.check_cut(config)
    parallel_rules.check_overlap(config)
    compute_rules.check_kernels(config)
    parallel_rules.check_context(config)
    parallel_rules.check_backend(config)
    expert_rules.check(config)
    size_rules.check_batch(config)
    pipeline_schedule.check(config)
    parallel_rules.check_zero(config)
    run_rules.check_faults(config)
    compute_rules.check_float8(config)
    compute_rules.check_recompute(config)
    compute_rules.check_offload(config)
    run_rules.check_learning_rate(config)
    run_rules.check_optimizer(config)
    run_rules.check_run(config)
    run_rules.check_paths(config)
