# SPDX-License-Identifier: Apache-2.0
"""Rehearse one command line after another in one process: a line of JSON in, a line out.

in   {"world": 8, "argv": [...]}
out  {"code": 0, "report": {...}, "text": "..."}

Importing torch takes longer than a small rehearsal, and the fake device must be loaded before it.
"""

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.rehearsal import guard


def serve() -> None:
    """Answer until the input ends."""
    guard.load()
    import pretrain_llama
    from tools.rehearsal import main

    gc.freeze()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ["WORLD_SIZE"] = str(asked["world"])
        said, path = io.StringIO(), asked["file"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            argv = [*asked["argv"], "--rehearse", "--rehearse-json", path]
            code = main.main(pretrain_llama, argv)
        report = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
        Path(path).unlink(missing_ok=True)
        print(json.dumps({"code": code, "report": report, "text": said.getvalue()}), file=answers)
        answers.flush()


if __name__ == "__main__":
    serve()
