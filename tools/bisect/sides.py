# SPDX-License-Identifier: Apache-2.0
"""Build a side of a comparison from the user's argument: a folder of a run, or a command line.

A finished run is read: its digests, log, checkpoints and flags. A command line is run first, with a
digest of every step, into a folder of this comparison.
"""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.bisect import recorded
from tools.bisect.lines import Lines, read
from tools.bisect.ranks import PROGRAM, Program, RunError, run
from training.flags.foreign import uses_of, value_of

# flags for the output of a run
PLACES = {
    "--save", "--save-interval", "--async-save", "--tensorboard-dir", "--wandb-project",
    "--wandb-exp-name", "--log-json", "--log-digests", "--exit-interval", "--eval-interval",
    "--sample-interval", "--log-interval", "--keep-last-k", "--save-retain-interval", "--save-hf",
    "--save-hf-dtype", "--save-hf-max-shard-size", "--save-hf-keep-last-k", "--profile",
    "--profile-step-start", "--profile-step-end", "--record-memory-history",
    "--memory-snapshot-path",
}  # fmt: skip
BEGINS = {"--load", "--ckpt-step", "--pretrained-checkpoint", "--finetune"}
SIZES = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
)  # fmt: skip


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
    unset: list[str] = field(default_factory=list)  # NAME=value of its command line


def without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return a command line without some flags and their values."""
    kept = [use for use in uses_of(argv) if use.dashed not in flags]
    return [word for use in kept for word in use.words]


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
            if "--mock-data" not in flags:  # do not write next to the data
                cache = work / f"run-{letter}" / "cache"
                flags = (*flags, "--data-cache-path", str(cache))
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
    program, before = _program(words, tree, ranks)
    unset = [w for w in before if re.match(r"\w+=", w) and not w.startswith("WORLD_SIZE=")]
    return Named(letter, text, program, unset=unset)


def _program(
    words: Sequence[str], tree: Path, ranks: int | None
) -> tuple[Program, Sequence[str]]:
    """Read a command line: [NAME=value] [python | torchrun ...] [program.py] flags.

    Returns the program and the words before it.
    """
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    flags = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    before, script = list(words[:flags]), tree / PROGRAM
    launcher = Path(next((word for word in words if "=" not in word), "")).name
    if at is not None and (at < flags or launcher == "torchrun" or launcher.startswith("python")):
        before, flags = list(words[:at]), at + 1
        script = Path(words[at])
        script = tree / PROGRAM if script.name == PROGRAM else script.resolve()
        if not script.is_file():
            raise ValueError(f"{script}: there is no such program")
    argv = list(words[flags:])
    world = ranks or int(_launched(before) or _least(argv))
    return Program(tree, script, tuple(argv), world), before


def _launched(before: Sequence[str]) -> str | None:
    """Return the number of ranks in a launcher's words."""
    for word in before:
        name, _, value = word.partition("=")
        if name == "WORLD_SIZE":
            return value
    found = value_of(before, "--nproc-per-node")
    return found if found.isdigit() else os.environ.get("WORLD_SIZE")


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
    if folder.exists():  # of an earlier comparison (main)
        shutil.rmtree(folder)
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
    argv = without(side.program.argv, PLACES if start is None else PLACES | BEGINS)
    if start is not None:
        number = str(int(start.name.partition("_")[2]))
        argv += ["--load", str(start.parent), "--ckpt-step", number]
        argv += ["--allow-change", "seed", "data", "tokenizer", "batch", "rope"]
    return argv
