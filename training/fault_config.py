# SPDX-License-Identifier: Apache-2.0
"""Define the settings of how a run notices faults and what it does about them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultConfig:
    """How faults are noticed and answered; see docs/reliability.md."""

    peer_checkpoint: int | None = None  # steps between copies into the supervisor's memory
    peer_timeout: float = 20.0  # seconds without a sign of life after which a rank counts as lost
    hang_timeout: float | None = None  # seconds without movement after which a run ends
    empty_unused_memory_level: int = 0  # CUDA's cache emptied: 1 before, 2 after an update, too
    check_replicas: int | None = None  # steps between two comparisons of replicas; None: never
    on_replica_mismatch: str = "stop"  # or "rewind"
    checksum_messages: bool = False
    on_spike: str | None = None  # "report", "stop", "rewind"; None: nobody looks
    spike_z_score: float = 10.0
    iterations_to_skip: tuple[int, ...] = ()  # counted, and not trained on
    rerun_mode: str = "validate_results"  # or "disabled": no step is run again
