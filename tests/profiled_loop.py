# SPDX-License-Identifier: Apache-2.0
"""Run pretrain_llama.py and write which files of the product its steady loop runs: a script.

    torchrun ... tests/profiled_loop.py FOLDER FLAG...

A profile hook of the interpreter, on every thread, notes the functions called from the start of
step FIRST to the start of step LAST. Each rank writes FOLDER/rank_R.json: {file: [functions]}.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pretrain_llama  # noqa: E402

FIRST, LAST = 4, 6  # calls of train_step; everything made or imported late is there by then


def main(folder: Path, argv: list[str]) -> int:
    ran, recording = set[CodeType](), threading.Event()
    calls, step = 0, pretrain_llama.train_step

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and recording.is_set():
            ran.add(frame.f_code)

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == FIRST:
            recording.set()
        if calls == LAST:
            recording.clear()
        return step(*args, **named)

    pretrain_llama.train_step = counted
    threading.setprofile(hook)
    sys.setprofile(hook)
    code = pretrain_llama.main(argv)
    sys.setprofile(None)
    files: dict[str, list[str]] = {}
    for each in ran:
        path = Path(each.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            files.setdefault(path.relative_to(ROOT).as_posix(), []).append(each.co_qualname)
    (folder / f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(files))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
