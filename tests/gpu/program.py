#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pretrain_llama.py in a Python that may lack packages of checkpoints and of data files.

With --rehearse-device it is the rehearsal of it.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find the program

from tests.gpu.row import Absent  # noqa: E402

if __name__ == "__main__":
    sys.meta_path.append(Absent())
    if "--rehearse-device" in sys.argv:
        from tools import rehearse

        code = rehearse.main(str(ROOT / "pretrain_llama.py"), sys.argv[1:])
        sys.stdout.flush()
        os._exit(code)  # as tools/rehearse.py does
    import pretrain_llama
    from training.run.process import as_process

    as_process(lambda: pretrain_llama.main(sys.argv[1:]), None)
