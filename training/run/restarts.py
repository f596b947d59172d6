# SPDX-License-Identifier: Apache-2.0
"""Messages from an attempt of a run to the next one, under torchrun --max-restarts.

torchrun restarts the ranks whatever ended them, even a mistake in the flags or a fault that occurs
before every first step. It gives every rank of every attempt a folder of its own:

    RUN/attempt_1/LOCAL_RANK/error.json    torchrun's: the cause, with which its report ends
                             end.json      ours: the exit code and the cause
                             stepped       ours: a step was made

An attempt whose predecessor ended with a mistake, by a signal or without a step prints so in one
sentence and exits at once, before torch is imported. Other launchers have no such folders.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from training.files.untrusted import printable, read_json

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
END, STEPPED = "end.json", "stepped"
MISTAKE, SIGNAL = 2, 128  # exit codes: of a mistake; of signal n, 128 + n
TURN = 10.0  # seconds, at most, that a node's other ranks wait for its first to record its end


class End(NamedTuple):
    """How a rank ended: its exit code, and why. again: it repeats the end of the attempt before."""

    code: int
    why: str
    again: bool = False


def write_error_file(text: str, error_file: str | None, end: End | None = None) -> None:
    """Write the cause to TORCHELASTIC_ERROR_FILE, if any: torchrun's report ends with it.

    end: what is recorded for the next attempt; None: a failure with this cause.
    """
    if error_file:
        more = {"timestamp": str(int(time.time())), "py_callstack": text}
        with suppress(OSError), open(error_file, "w", encoding="utf-8") as file:  # a full disk
            json.dump({"message": {"message": text, "extraInfo": more}}, file)
    tell_next(end or End(1, text), error_file)


def tell_next(end: End, error_file: str | None) -> None:
    """Record for the next attempt how this rank ended. Only the first record counts."""
    if folder := _folder(error_file):
        with suppress(OSError), open(folder / END, "x", encoding="utf-8") as file:
            json.dump(end._asdict(), file)


def note_step(error_file: str | None) -> None:
    """Record for the next attempt that this one made a step."""
    if folder := _folder(error_file):
        with suppress(OSError):
            (folder / STEPPED).touch()


def _folder(error_file: str | None) -> Path | None:
    """Return the folder that torchrun gave this rank in this attempt, or None."""
    found = Path(error_file).parent if error_file else None
    return found if found and re.fullmatch(r"attempt_\d+", found.parent.name) else None


def end_again(environ: Mapping[str, str]) -> None:
    """Exit if the end of the attempt before shows that another attempt cannot help."""
    error_file = environ.get(ERROR_FILE)
    folder = _folder(error_file)
    if folder is None:
        return
    number = int(folder.parent.name.partition("_")[2])
    before = folder.parent.with_name(f"attempt_{number - 1}")
    if not number or not before.is_dir() or (end := final(before)) is None:
        return
    says = f"not restarted, because the previous attempt {reason(end)}"
    if folder.name == "0" and not end.again:
        print(f"{Path(sys.argv[0]).name}: {says}", file=sys.stderr, flush=True)
    write_error_file(says, error_file, end._replace(again=True))
    let_first_speak(error_file)
    os._exit(end.code)


def let_first_speak(error_file: str | None) -> None:
    """Wait until the node's first rank has recorded how it ended: torchrun kills all ranks once one
    has ended, and might kill that one too early.
    """
    if folder := _folder(error_file):
        told, deadline = folder.parent / "0" / END, time.monotonic() + TURN
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def reason(end: End) -> str:
    """Return why no attempt follows, as the end of a sentence: "ended with a mistake: ..."."""
    if end.code == MISTAKE:
        return f"ended with a mistake: {end.why}"
    if end.code > SIGNAL:
        return f"was {end.why}"
    return f"completed no step: {end.why}"


def final(attempt: Path) -> End | None:
    """Return why no attempt is to follow this one, or None if one may follow.

    A signal counts only if it ended every rank: torchrun also signals ranks that survive a fault.
    """
    ranks = sorted((path for path in attempt.iterdir() if path.name.isdigit()), key=_number)
    ends = {rank: _read(rank / END) for rank in ranks}
    known = [end for end in ends.values() if end is not None]
    mistakes = [end for end in known if end.code == MISTAKE]
    signals = [end for end in known if end.code > SIGNAL]
    if mistakes or (signals and len(signals) == len(ends)):
        return [*mistakes, *signals][0]
    if any((rank / STEPPED).exists() for rank in ranks):
        return None
    others = [end for end in known if end.code <= SIGNAL]
    for end in sorted(others, key=lambda end: " failed first" not in end.why):
        return end._replace(code=1)
    silent = next((rank.name for rank, end in ends.items() if end is None), "0")
    return End(1, f"local rank {silent} died and left no message (killed?)")


def _number(path: Path) -> int:
    return int(path.name)


def _read(path: Path) -> End | None:
    """Return a rank's record of its end, None if there is none."""
    try:
        said = read_json(path)
        return End(int(said["code"]), printable(str(said["why"])), bool(said["again"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
