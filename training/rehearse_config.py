# SPDX-License-Identifier: Apache-2.0
"""Define the settings of a rehearsal, which tools/rehearse.py carries out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RehearseConfig:
    """Which rank is rehearsed, on which device, and what is written; see docs/rehearsal.md."""

    rehearse: bool = False
    rehearse_rank: int = 0
    rehearse_all_ranks: bool = False
    rehearse_device: str = "h100"  # or another file of tools/rehearsal/devices, a path, "cpu"
    rehearse_steps: int = 2
    rehearse_full: bool = False
    rehearse_json: str | None = None
    rehearse_trace: str | None = None
