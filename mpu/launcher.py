# SPDX-License-Identifier: Apache-2.0
"""Know which launcher started this process, by the variables that it sets."""

import os

# the first that is set counts
MARKS = {"TORCHELASTIC_RUN_ID": "torchrun", "WEFT_SUPERVISOR": "supervise", "SLURM_STEP_ID": "srun"}


def launched_by() -> str:
    """Return "torchrun", "supervise" (tools/supervise.py), "srun", or "" for none of them."""
    return next((name for mark, name in MARKS.items() if mark in os.environ), "")


def shares_cores() -> bool:
    """Return whether a rank takes only its share of the node's cores, as nobody said how many.

    torchrun sets OMP_NUM_THREADS=1 where nobody did, which would leave cores idle.
    """
    unset = {"torchrun": (None, "1"), "supervise": (None,)}.get(launched_by(), ())
    return os.environ.get("OMP_NUM_THREADS") in unset
