# SPDX-License-Identifier: Apache-2.0
"""Check the flags against each other: what must divide what, and what excludes what.

A rule between two or three settings is a row next to one of them (`excludes` and `stops` of
training/settings/arguments.py). A rule that divides sizes, queries a device or opens files is a
function in CHECKS. Each raises UsageError with the flag, its value and the rule. No rule writes a
file or waits for another rank, so a mistake is reported before the first collective.
"""

from collections.abc import Callable, Iterator
from typing import Any

from mpu.pipeline.schedules import SPLIT
from training.flags import (
    compute_rules,
    expert_rules,
    parallel_rules,
    run_rules,
    size_rules,
)
from training.flags.flag_table import live_flags
from training.settings import pipeline_schedule
from training.settings.config import Config, UsageError
from training.settings.setting import Number, Setting

ACCUMULATE = "--accumulate-allreduce-grads-in-fp32"


def check_given(given: dict[str, Any]) -> None:
    """Raise UsageError if a required flag is missing, or flags exclude or contradict each other."""
    required = [flag.name for flag in live_flags().values() if flag.row.required]
    if missing := [name for name in required if name not in given]:
        one = "is missing: it has" if len(missing) == 1 else "are missing: they have"
        raise UsageError(f"{', '.join(missing)} {one} no default")
    if "--train-iters" not in given and "--train-samples" not in given:
        raise UsageError("--train-iters or --train-samples is missing: give one of them")
    for flag in live_flags().values():
        for other in flag.row.excludes if _is_on(given.get(flag.name)) else ():
            if _is_on(given.get(other)):
                raise UsageError(f"{flag.name} and {other} exclude each other: give one of them")
    if given.get("--main-grads-dtype") == "bf16" and ACCUMULATE in given:
        raise UsageError(f"--main-grads-dtype bf16 and {ACCUMULATE} contradict each other")
    expert_rules.check_given(given)
    heads, hidden = given["--num-attention-heads"], given["--hidden-size"]
    if "--kv-channels" not in given and hidden % heads:
        raise UsageError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: "
            "choose a multiple, or give the head size as --kv-channels"
        )
    groups = given.get("--num-query-groups", heads)
    if groups != heads and "--group-query-attention" not in given:
        raise UsageError(
            f"--num-query-groups {groups} needs --group-query-attention, without which Megatron-LM "
            "ignores it"
        )


def _is_on(value: Any) -> bool:
    """Return whether a value excludes another flag: an off-value, such as 0 steps, does not."""
    return value not in (None, 0, ())


def idle(given: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield a line for each given flag that has no effect."""
    for flag in live_flags().values():
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
    flag = live_flags()[row.needs[0]]
    value = getattr(getattr(config, flag.section), flag.dest)
    return bool(value == row.needs_value) and _acts(flag.row, given, config)


def check_stops(config: Config) -> None:
    """Raise UsageError with the sentence of the first of all `stops` that applies."""
    for flag in live_flags().values():
        for stop in flag.row.stops:
            found = [_holds(each, config) for each in stop.when.split(" & ")]
            right = [_holds(each, config) for each in stop.unless.split(" or ") if each]
            if None not in found and right.count(None) == len(right):
                raise UsageError(" ".join(stop.sentence.format(*found).split()))


def _holds(condition: str, config: Config) -> str | None:
    """Return the text of a setting's value if a condition of a Stop holds, else None."""
    name, _, values = condition.partition(" ")
    flag = live_flags()[name]
    value = getattr(getattr(config, flag.section), flag.dest)
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    off = value in (None, flag.row.default) or (value == 0 and not _zero_counts(flag.row))
    return text if (text in values.split("|") if values else not off) else None


def _zero_counts(row: Setting) -> bool:
    """Return whether 0 is an ordinary value: so for a number that is off if it is left out."""
    return isinstance(row.rule, Number) and row.default is None and "0" not in row.off.split()


# the checks of a whole config, in order; the first failure is reported
CHECKS: tuple[Callable[[Config], None], ...] = (
    parallel_rules.check_device,
    run_rules.check_evaluated,  # before its interval is missed, which falls without data
    check_stops,
    size_rules.check,
    size_rules.check_micro_batch,
    size_rules.check_cut,
    parallel_rules.check_overlap,
    compute_rules.check_kernels,
    parallel_rules.check_context,
    parallel_rules.check_backend,
    expert_rules.check,
    size_rules.check_batch,
    pipeline_schedule.check,
    parallel_rules.check_zero,
    run_rules.check_faults,
    compute_rules.check_float8,
    compute_rules.check_recompute,
    compute_rules.check_offload,
    run_rules.check_learning_rate,
    run_rules.check_run,
    run_rules.check_paths,
)


def check(config: Config) -> None:
    """Raise UsageError if a whole config breaks a rule."""
    for rule in CHECKS:
        rule(config)
