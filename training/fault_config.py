# SPDX-License-Identifier: Apache-2.0
"""Define the settings of how a run notices faults and what it does about them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultConfig:
    """How faults are noticed and answered; see docs/reliability.md."""

    peer_checkpoint: int | None = None  # steps between copies into the supervisor's memory
    peer_timeout: float = 20.0  # seconds without a sign of life after which a rank counts as lost
