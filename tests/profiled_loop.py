# SPDX-License-Identifier: Apache-2.0
"""Run pretrain_llama.py and write what its steady loop, its step and its save run: a script.

    torchrun ... tests/profiled_loop.py FOLDER FLAG...

A profile hook of the interpreter counts the product's functions that the main thread calls: from
the start of step FIRST to that of step LAST, inside of `train_step` meanwhile, and inside of
`Saver.save`. Each rank writes FOLDER/rank_R.json: {part: {file: {function: calls}}}.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pretrain_llama  # noqa: E402
from training.run.saver import Saver  # noqa: E402

FIRST, LAST = 4, 6  # calls of train_step; everything made or imported late is there by then
Calls = Counter[CodeType]


def by_file(ran: Calls) -> dict[str, dict[str, int]]:
    files: dict[str, dict[str, int]] = {}
    for code, count in ran.items():
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            functions = files.setdefault(path.relative_to(ROOT).as_posix(), {})
            functions[code.co_qualname] = functions.get(code.co_qualname, 0) + count
    return files


def main(folder: Path, argv: list[str]) -> int:
    parts = {name: Calls() for name in ("iterations", "train_step", "save")}
    active = set[str]()
    calls, step, save = 0, pretrain_llama.train_step, Saver.save

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            for part in active:
                parts[part][frame.f_code] += 1

    def counted_step(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == FIRST:
            active.add("iterations")
        if calls == LAST:
            active.discard("iterations")
        if "iterations" not in active:
            return step(*args, **named)
        active.add("train_step")
        out = step(*args, **named)
        active.discard("train_step")
        return out

    def counted_save(*args: Any, **named: Any) -> Any:
        active.add("save")
        save(*args, **named)
        active.discard("save")

    pretrain_llama.train_step, Saver.save = counted_step, counted_save
    sys.setprofile(hook)
    code = pretrain_llama.main(argv)
    sys.setprofile(None)
    found = {name: by_file(ran) for name, ran in parts.items()}
    (folder / f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
