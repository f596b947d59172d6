# SPDX-License-Identifier: Apache-2.0
"""Be one rank under torchrun, disturbed in some of its attempts only: a script, not a test.

    restarted_rank.py '{"0": {"fault": FAULT, "flags": {"1": ["--lr", "2e-3"]}}, ...}' FLAG...

The keys are attempts, as TORCHELASTIC_RESTART_COUNT counts them; "flags" are those of a rank alone.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.run.restarts import end_again  # noqa: E402

if __name__ == "__main__":
    end_again(os.environ)

import pretrain_llama  # noqa: E402
from tests.faults.fault_injection import inject  # noqa: E402

if __name__ == "__main__":
    here = json.loads(sys.argv[1]).get(os.environ["TORCHELASTIC_RESTART_COUNT"], {})
    argv = [*sys.argv[2:], *here.get("flags", {}).get(os.environ["RANK"], [])]
    if "fault" in here:
        inject(here["fault"], Path())
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    pretrain_llama.as_process(lambda: pretrain_llama.main(argv), error_file)
