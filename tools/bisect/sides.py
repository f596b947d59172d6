# SPDX-License-Identifier: Apache-2.0
"""Build a side of a comparison from the user's argument: a folder of a run, or a command line.

A finished run is read: its digests, log, checkpoints and flags. A command line is run first, with a
digest of every step, into a folder of this comparison.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.bisect import recorded
from tools.bisect.lines import Lines, read
from tools.bisect.ranks import PROGRAM, ROOT, Program, RunError, run

# flags for the output of a run, and the number of values of each
PLACES = {
    "--save": 1, "--save-interval": 1, "--async-save": 0, "--tensorboard-dir": 1,
    "--wandb-project": 1, "--wandb-exp-name": 1, "--log-json": 1, "--log-digests": 1,
    "--exit-interval": 1, "--eval-interval": 1, "--sample-interval": 1,
    "--log-interval": 1, "--keep-last-k": 1, "--save-retain-interval": 1, "--save-hf": 1,
    "--save-hf-dtype": 1, "--save-hf-max-shard-size": 1, "--save-hf-keep-last-k": 1,
    "--profile": 0, "--profile-step-start": 1, "--profile-step-end": 1,
    "--record-memory-history": 0, "--memory-snapshot-path": 1,
}  # fmt: skip
BEGINS = {"--load": 1, "--ckpt-step": 1, "--pretrained-checkpoint": 1, "--finetune": 0}
SIZES = {
    "--tensor-model-parallel-size": 1, "--model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1, "--context-parallel-size": 1,
}  # fmt: skip


@dataclass
class Named:
    """A side: its letter, the user's argument, its program, and the logs of its run.

    folder: has its files. ran: it was run for this comparison.
    """

    letter: str
    text: str
    program: Program | None
    lines: Lines = field(default_factory=Lines)
    folder: Path | None = None
    ran: bool = False
    why_not: str = ""  # why it cannot be replayed


def without(argv: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Return flags without some of them and their values, also in the form --flag=value."""
    remaining: list[str] = []
    words = iter(argv)
    for word in words:
        name, has, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in flags:
            remaining.append(word)
            continue
        for _ in range(0 if has else flags[name]):
            next(words, None)
    return remaining


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, None if it is not given."""
    found = None
    for i, word in enumerate(argv):
        name, has, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if has else argv[i + 1] if i + 1 < len(argv) else None
    return found


def is_folder(path: Path) -> bool:
    """Return whether a folder exists; a command line may be too long for a path."""
    try:
        return path.is_dir()
    except OSError:
        return False


def named(
    letter: str,
    text: str,
    tree: Path,
    ranks: int | None,
    work: Path,
    like: "Named | None" = None,
    model_file: Path | None = None,
) -> Named:
    """Return the side that a text names: a folder, or a command line.

    like: the other side, whose flags are used if the text is empty. model_file: a file that a
    folder's run may use besides those of model/. Raises ValueError.
    """
    folder = Path(text)
    if text and is_folder(folder):
        lines = read(folder)
        side = Named(letter, text, None, lines, folder)
        argv = lines.command_line
        if argv is None:
            side.why_not = "its command line is not recorded there (no digests and no checkpoint)"
            return side
        try:
            sizes = (lines.head.get("world"), lines.config.get("parallel.world_size", 1))
            world = ranks or recorded.world_of(next(n for n in sizes if n is not None), letter)
            flags = recorded.flags_of(argv, tree, letter, model_file)
        except ValueError as error:
            side.why_not = str(error)
        else:
            if value_of(flags, "--data-path") is not None:  # do not write next to the data
                flags = (*flags, "--data-cache-path", str(work / "cache"))
            side.program = Program(tree, tree / PROGRAM, flags, world)
        return side
    if model_file is not None:
        raise ValueError(
            f"--model-file-{letter.lower()} is only for the folder of a run: {letter} is a command "
            "line, which names it by --model-file"
        )
    if not text and like is not None and like.program is None:
        raise ValueError(f"{letter}: A cannot be run again: {like.why_not}")
    if not text and like is not None and like.program is not None:
        script = like.program.script
        script = tree / PROGRAM if script.name == PROGRAM else script
        program = replace(like.program, tree=tree, script=script)
        return Named(letter, f"the same flags in {tree.name}", program)
    words = shlex.split(text)
    if not words:
        raise ValueError(f"{letter}: name a folder of a run, or a command line in quotes")
    if len(words) == 1 and not words[0].startswith("-"):
        raise ValueError(f"{letter}: {text} is neither a folder nor a command line")
    return Named(letter, text, _program(words, tree, ranks))


def _program(words: Sequence[str], tree: Path, ranks: int | None) -> Program:
    """Read a command line: [NAME=value] [python | torchrun ...] [program.py] flags."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    flags = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    before, script = list(words[:flags]), tree / PROGRAM
    if at is not None and (at < flags or words[0] in ("torchrun", "python", "python3")):
        before, flags = list(words[:at]), at + 1
        script = Path(words[at])
        script = tree / PROGRAM if script.name == PROGRAM else script.resolve()
        if not script.is_file():
            raise ValueError(f"{script}: there is no such program")
    argv = list(words[flags:])
    world = ranks or int(_launched(before) or _least(argv))
    return Program(tree, script, tuple(argv), world)


def _launched(before: Sequence[str]) -> str | None:
    """Return the number of ranks in a launcher's words."""
    for word in before:
        name, _, value = word.partition("=")
        if name == "WORLD_SIZE":
            return value
    found = value_of(before, "--nproc-per-node")
    return found if found and found.isdigit() else os.environ.get("WORLD_SIZE")


def _least(argv: Sequence[str]) -> int:
    """Return the fewest ranks that flags allow."""
    count = 1
    for flag in SIZES:
        count *= int(value_of(argv, flag) or 1)
    return count


def run_side(side: Named, work: Path, steps: int | None, limit: float) -> str:
    """Run a command line with digests of every step, and read its logs.

    Returns the failure of a step, or "". Raises RunError if it began no step.
    """
    assert side.program is not None
    folder = work / f"run-{side.letter}"
    argv = without(side.program.argv, PLACES)
    total = int(value_of(argv, "--train-iters") or 0)
    count = min(steps or total, total or steps or 0)
    more = ["--log-json", str(folder / "log.jsonl"), "--log-interval", "1", "--log-digests", "1"]
    if count and count != total:
        more += ["--exit-interval", str(count)]
    if count > 10:  # so that a replay has a checkpoint nearby
        more += ["--save", str(folder / "saved"), "--save-interval", str(-(-count // 8))]
    try:
        run(replace(side.program, argv=tuple(argv)), folder, more, limit=limit)
        failed = ""
    except RunError as error:
        failed = str(error)
    side.lines, side.folder, side.ran = read(folder), folder, True
    if failed and not side.lines.head:
        raise RunError(f"{side.letter}: {failed}")
    return failed


def replay_flags(side: Named, start: Path | None) -> list[str]:
    """Return the flags of a replay: the run's, but it writes nothing and begins at a checkpoint.

    start: the checkpoint's directory; None: where the run itself began.
    """
    assert side.program is not None
    argv = without(side.program.argv, PLACES if start is None else {**PLACES, **BEGINS})
    if start is not None:
        number = str(int(start.name.partition("_")[2]))
        argv += ["--load", str(start.parent), "--ckpt-step", number]
        argv += ["--allow-change", "seed", "data", "tokenizer", "batch", "rope"]
    return argv


__all__ = ["ROOT", "Named", "named", "replay_flags", "run_side", "value_of", "without"]
