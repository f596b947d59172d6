# SPDX-License-Identifier: Apache-2.0
"""Check the flags of faults against each other and against the layout."""

from training.config import Config, UsageError

# flags whose value "rewind" goes back to a checkpoint of --save
REWINDS = ("--on-nan", "--on-spike", "--on-replica-mismatch")


def check(config: Config) -> None:
    """Raise UsageError for flags that contradict each other or the layout."""
    _numbers(config)
    seconds, minutes = config.fault.hang_timeout, config.parallel.distributed_timeout_minutes
    if seconds is not None and seconds > 60 * minutes:
        raise UsageError(
            f"--hang-timeout {seconds:g}: must be at most the {60 * minutes} s of "
            f"--distributed-timeout-minutes {minutes}, after which the run ends in any case"
        )


def _numbers(config: Config) -> None:
    fault = config.fault
    answers = (config.run.on_nan, fault.on_spike, fault.on_replica_mismatch)
    for flag, answer in zip(REWINDS, answers, strict=True):
        if answer == "rewind" and not config.checkpoint.save:
            raise UsageError(f"{flag} rewind needs --save: it goes back to a checkpoint there")
    if 0 in fault.iterations_to_skip:
        raise UsageError("--iterations-to-skip 0: iterations count from 1")
