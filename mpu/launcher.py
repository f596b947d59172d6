# SPDX-License-Identifier: Apache-2.0
"""Know what the launcher's variables say: which one it is, and where ranks meet."""

import os
from dataclasses import dataclass, field

# the first that is set counts
MARKS = {"TORCHELASTIC_RUN_ID": "torchrun", "WEFT_SUPERVISOR": "supervise", "SLURM_STEP_ID": "srun"}


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks meet, as the launcher said: MASTER_ADDR and MASTER_PORT.

    agent: torchrun's agent keeps the store, over all restarts. secret: what only this run's ranks
    know (docs/reliability.md); b"" where nobody set one.
    """

    host: str = ""
    port: int = 0
    agent: bool = False
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def from_env(cls, secret: bytes) -> "MeetingPoint":
        """Read the environment, but for the secret."""
        e, port = os.environ, os.environ.get("MASTER_PORT", "")
        return cls(
            e.get("MASTER_ADDR", ""),
            int(port) if port.isascii() and port.isdigit() else 0,  # check_meeting complains
            e.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            secret,
        )


def launched_by() -> str:
    """Return "torchrun", "supervise" (tools/supervise.py), "srun", or "" for none of them."""
    return next((name for mark, name in MARKS.items() if mark in os.environ), "")


def shares_cores() -> bool:
    """Return whether a rank takes only its share of the node's cores, as nobody said how many.

    torchrun sets OMP_NUM_THREADS=1 where nobody did, which would leave cores idle.
    """
    unset = {"torchrun": (None, "1"), "supervise": (None,)}.get(launched_by(), ())
    return os.environ.get("OMP_NUM_THREADS") in unset
