#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find the first tensor that differs between two runs that should be equal, and name its line.

    python tools/bisect_runs.py runs/monday runs/tuesday
    python tools/bisect_runs.py "--num-layers 2 ... --seed 1" "--num-layers 2 ... --seed 2"
    python tools/bisect_runs.py "--num-layers 2 ..." --commit-a HEAD~20 --commit-b HEAD

A and B: a folder of a finished run, or a command line in quotes, which is run first. The first step
that differs is found from --log-digests, or from losses and norms. Both sides then replay that
step, from the nearest checkpoint before it or from the start, on CPUs of this machine, and record
every tensor. The output is one sentence, and report.json in --out. The exit code is 0 if nothing
differs, 1 if something does, 2 for a mistake in the command line.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import torch

from mpu.torch_private import running_node
from tools.bisect.checkouts import NoCheckout, checkout
from tools.bisect.lines import Step, compared, first_step, same_machine
from tools.bisect.ranks import ROOT, RunError, run
from tools.bisect.recorded import RANKS
from tools.bisect.sides import Named, named, replay_flags, run_side
from tools.command_line import Parser, integer
from tools.compare.first_difference import Allowed, allowed
from tools.compare.join import Side
from tools.compare.verdict import Verdict, verdict_of
from training.files.untrusted import first_of, printable, private, sentence
from training.run.waiting import Progress, duration, waiting
from training.settings.setting import flag_of

REPORT = "report.json"


@dataclass
class Outcome:
    """The result. sentence: for people. notes: what could not be decided, and why. progress: of the
    runs that are made for it.
    """

    sentence: str = ""
    same: bool = False
    step: Step | None = None
    verdict: Verdict | None = None
    start: str = ""
    settings: dict[str, list[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress, repr=False)

    def json(self) -> dict[str, Any]:
        """Return the outcome as types of JSON."""
        return {
            "sentence": self.sentence, "same": self.same,
            "step": None if self.step is None else vars(self.step),
            "verdict": None if self.verdict is None else self.verdict.json(),
            "start": self.start, "settings": self.settings, "notes": self.notes,
        }  # fmt: skip


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(__doc__, epilog="docs/bisect.md has three worked cases.")
    add = parser.add_argument
    add("a", metavar="A", help="a folder of a run, or a command line in quotes")
    add("b", metavar="B", nargs="?", default="", help="the same; default: the flags of A")
    for side in "ab":
        commit = f"--commit-{side}"
        add(commit, metavar="COMMIT", help=f"run {side.upper()} with the code of this commit")
        ranks = f"number of processes of {side.upper()}; required if a folder has more than {RANKS}"
        add(f"--ranks-{side}", type=integer(1), metavar="N", help=ranks)
        own = f"model file of the folder {side.upper()}, if not one of model/: its code is run"
        add(f"--model-file-{side}", type=Path, metavar="FILE", help=own)
    add("--steps", type=integer(1), metavar="N", help="for a command line: run at most N steps")
    add("--step", type=integer(1), metavar="N", help="compare this step only")
    add("--out", type=Path, metavar="FOLDER", help="folder for the report and all files")
    add("--timeout", type=float, default=900.0, metavar="SECONDS", help="for one run; default: 900")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs; see above for the exit code."""
    options = read(argv)
    with tempfile.TemporaryDirectory(prefix="bisect-") as temporary:
        work = options.out or Path(temporary)
        try:
            running_node()
            if options.out and work.exists() and not _is_ours(work):
                raise ValueError(f"--out {work}: it exists and is not of an earlier comparison")
            work.mkdir(parents=True, exist_ok=True)
            trees = [
                checkout(commit, Path(temporary) / f"tree-{side}") if commit else ROOT
                for side, commit in zip("ab", (options.commit_a, options.commit_b), strict=True)
            ]
            own = options.model_file_a, options.model_file_b
            a = named("A", options.a, trees[0], options.ranks_a, work, model_file=own[0])
            b = named("B", options.b, trees[1], options.ranks_b, work, like=a, model_file=own[1])
            asked = options.steps, options.step, options.timeout
            with waiting("looking for the first difference") as progress:
                found = bisect(a, b, work, *asked, progress=progress)
        except (ValueError, OSError, NoCheckout, RunError) as error:
            print(f"tools/bisect_runs.py: {sentence(error)}", file=sys.stderr)
            return 2
        for note in found.notes:
            print(f"note: {printable(note)}")
        print(printable(found.sentence))
        if options.out:
            text = json.dumps({**found.json(), "a": a.text, "b": b.text}, indent=1)
            with open(work / REPORT, "w", encoding="utf-8", opener=private) as file:
                file.write(text + "\n")
    return int(not found.same)


def _is_ours(out: Path) -> bool:
    """Return whether a folder has only files of the names and forms that a comparison writes.

    This is as in training/files/owned.py, which the processes of two checkouts cannot share.
    """
    folders = [f"{what}-{side}" for what in ("run", "replay") for side in "AB"]
    replayed = re.compile(r"record|(out|err|stack)\.\d+|rank-\d+\.(bin|json)|step\.json")
    made = re.compile(r"(out|err|stack)\.\d+|(log|digests)\.jsonl|saved|cache")
    if out.is_symlink() or not out.is_dir():
        return False
    for path in out.iterdir():
        if path.name in folders and path.is_dir() and not path.is_symlink():
            run = path.name.startswith("run")
            names = [p.name for p in (path.iterdir() if run else path.rglob("*"))]
            if not all(map((made if run else replayed).fullmatch, names)):
                return False
            if run and "out.0" not in names and names not in ([], ["cache"]):
                return False  # a user's own run
        elif path.name != REPORT or not path.is_file():
            return False
        elif not path.read_bytes().startswith(b'{\n "sentence"'):
            return False
    return True


def bisect(
    a: Named,
    b: Named,
    work: Path,
    steps: int | None,
    number: int | None,
    limit: float,
    progress: Progress | None = None,
) -> Outcome:
    """Find the first step that differs, replay it on both sides, and compare its tensors.

    progress: is updated with each run. Raises ValueError, RunError.
    """
    found = Outcome(progress=progress or Progress())
    for side in (a, b):
        if side.unset:
            names = ", ".join(side.unset)
            found.notes.append(f"{side.letter} runs without {names}: set it for this tool instead")
        if side.program is not None and side.folder is None:
            place = work / f"run-{side.letter}"
            for each in (a, b):
                if each.folder and each.folder.resolve().is_relative_to(place.resolve()):
                    raise ValueError(
                        f"--out {work}: a run of {side.letter} would replace {each.folder}, which "
                        f"is {each.letter}: name another folder"
                    )
            found.progress.begin(f"running {side.letter}, for {duration(limit)} at most")
            if failed := run_side(side, work, steps, limit):
                found.notes.append(f"{side.letter} failed: {failed}")
    sides = (a.lines, b.lines)
    may = allowed(a.lines.config, b.lines.config)
    if why := same_machine(*sides):
        found.notes.append(f"{why}: equal bits are not expected, so sketches are compared")
        may = replace(may, exact=False)
    found.settings = different_settings(a, b)
    if not all(lines.steps for lines in sides):
        missing = " and ".join(s.letter for s in (a, b) if not s.lines.steps)
        found.notes.append(
            f"no digests (--log-digests) of {missing}: only losses and norms are compared, so an "
            "earlier step may differ in other values"
        )
    for side in (a, b):
        if not side.ran and (was := side.lines.head.get("torch")) not in (None, torch.__version__):
            found.notes.append(
                f"{side.letter} was made with torch {was}, but its steps are replayed with torch "
                f"{torch.__version__}"
            )
    step = Step(number, "", f"step {number}, as asked for", number - 1) if number else None
    step = step or first_failing(a, b) or first_step(*sides, may, found.notes)
    if step is None:
        last = compared(*sides, may)[-1][0]
        failures = [note for note in found.notes if " failed: " in note]
        found.same, found.sentence = not failures, f"no step differs up to step {last}"
        if failures:
            found.sentence += f"; then {'; '.join(failures)}"
        return found
    found.step = step
    replay(a, b, may, found, work, limit)
    return found


def first_failing(a: Named, b: Named) -> Step | None:
    """Return the first step of a side whose run began and ended before that step was done."""
    for side in (a, b):
        if side.ran and not side.lines.steps:
            began = int(side.lines.head.get("iteration", 0))
            text = f"{side.letter} fails in step {began + 1}, its first"
            return Step(began + 1, "failure", text, began)
    return None


def different_settings(a: Named, b: Named) -> dict[str, list[Any]]:
    """Return the settings that differ, except for paths, by dotted name."""
    ours, theirs = a.lines.config, b.lines.config
    if not ours or not theirs:  # neither digests nor a save record them
        return {}
    places = ("checkpoint.", "log.", "model.model_file")  # model_digest identifies that file
    names = [name for name in {**ours, **theirs} if not name.startswith(places)]
    found = {n: [ours.get(n), theirs.get(n)] for n in names if ours.get(n) != theirs.get(n)}
    for name in {**a.lines.head.get("digests", {}), **b.lines.head.get("digests", {})}:
        pair = [side.lines.head.get("digests", {}).get(name) for side in (a, b)]
        if pair[0] != pair[1] and None not in pair:
            found[name] = pair
    return found


def start_of(a: Named, b: Named, step: Step) -> tuple[Path | None, int]:
    """Return the newest checkpoint of either side from before a step, and its iteration.

    None and 0 if there is none: then the replay begins at the start of the runs.
    """
    saves = {i: path for side in (b, a) for i, path in side.lines.saves.items()}
    last = max((i for i in saves if i <= step.between and i < step.iteration), default=0)
    return (saves[last], last) if last else (None, 0)


def replay(a: Named, b: Named, may: Allowed, found: Outcome, work: Path, limit: float) -> None:
    """Replay the step that was found on both sides, record its tensors, and compare."""
    step = found.step
    assert step is not None
    differ = f"{step.text}; flags that differ: {flags(found)}" if found.settings else step.text
    for side in (a, b):
        if side.program is None:
            found.sentence = f"{differ}. {side.letter} cannot be run again: {side.why_not}"
            return
    start, iteration = start_of(a, b, step)
    found.start = f"the checkpoint {start.name}" if start else "the start of the run"
    begins = iteration == step.iteration - 1 or may.exact
    may = replace(may, begins=begins, distances=step.distances)
    try:
        records = made_again((a, b), start, step.iteration, found, work, limit)
        found.verdict = verdict_of(Side(records[0]), Side(records[1]), may)
        if found.verdict.same and step.what == "weight" and may.exact:
            differ += f". Step {step.iteration} itself is equal on both sides"
            later = made_again((a, b), start, step.iteration + 1, found, work, limit)
            verdict = verdict_of(Side(later[0]), Side(later[1]), may)
            if not verdict.same:  # it was changed between two steps
                found.verdict, records = verdict, later
                differ += ", but a tensor changes between it and the next step"
        else:
            began = max(int(side.lines.head.get("iteration", 0)) for side in (a, b))
            replays = Replays((a, b), start, max(iteration, began), may, work, limit)
            differ, records = earlier(replays, differ, found, records)
    except RunError as error:
        found.sentence = f"{differ}. {error}"
        return
    found.sentence = conclude(a, b, found, differ, records)
    found.same = not step.what and found.verdict.same


class Replays(NamedTuple):
    """The parameters of a replay. low: the iteration after which both sides are equal."""

    sides: Sequence[Named]
    start: Path | None
    low: int
    may: Allowed
    work: Path
    limit: float

    def verdict(self, number: int, found: Outcome) -> tuple[list[Path], Verdict]:
        """Replay a step and compare it; return the records and the verdict. Raises RunError."""
        records = made_again(self.sides, self.start, number, found, self.work, self.limit)
        return records, verdict_of(Side(records[0]), Side(records[1]), self.may)


def earlier(
    replays: Replays, differ: str, found: Outcome, records: list[Path]
) -> tuple[str, list[Path]]:
    """Look for an earlier step that differs in tensors which digests do not cover.

    These are the moments, where equal bits are expected and the step that was found begins with
    other ones; and a learning rate whose effect is below the tolerance between two layouts. Returns
    the start of the sentence and the records of the step. Raises RunError.
    """
    step, low = found.step, replays.low
    assert step is not None and found.verdict is not None
    high = step.iteration
    rates = [json.loads((r / "step.json").read_text()).get("rates", {}) for r in records]
    for number in sorted(rates[0].keys() & rates[1].keys(), key=int):
        if rates[0][number] != rates[1][number] and int(number) < high:
            high = int(number)
            records, found.verdict = replays.verdict(high, found)
    while replays.may.exact and found.verdict.begins and low + 1 < high:
        middle = (low + high) // 2
        tried, verdict = replays.verdict(middle, found)
        if verdict.same:
            low = middle
        else:
            high, records, found.verdict = middle, tried, verdict
    if high == step.iteration:
        return differ, records
    found.step = replace(step, iteration=high)
    return f"{differ}. Step {high} already differs, in tensors without digests", records


def made_again(
    sides: Sequence[Named],
    start: Path | None,
    number: int,
    found: Outcome,
    work: Path,
    limit: float,
) -> list[Path]:
    """Replay and record a step on both sides; return the records' folders. Raises RunError."""
    records = []
    for side in sides:
        assert side.program is not None
        folder = work / f"replay-{side.letter}"
        if folder.exists():  # of an earlier replay or an earlier comparison (main)
            shutil.rmtree(folder)
        program = replace(side.program, argv=tuple(replay_flags(side, start)))
        found.progress.begin(
            f"making step {number} of {side.letter} again, for {duration(limit)} at most"
        )
        try:
            run(program, folder, record=number, limit=limit)
        except RunError as error:
            raise RunError(f"{side.letter} cannot replay step {number}: {error}") from None
        records.append(folder / "record")
    return records


def conclude(a: Named, b: Named, found: Outcome, differ: str, records: Sequence[Path]) -> str:
    """Return the sentence about the step and the tensor."""
    verdict, step = found.verdict, found.step
    assert verdict is not None and step is not None
    if not verdict.same:
        return f"{differ}. Replayed from {found.start}, {verdict.sentence}"
    if not step.what:
        return f"{differ}. Replayed from {found.start}, {verdict.sentence}"
    unequal = [side.letter for side, record in zip((a, b), records, strict=True)
             if not repeats(side, step, record)]  # fmt: skip
    which = " and ".join(unequal)
    repeat = f"{which} does not repeat" if which else "both repeat"
    return (
        f"{differ}. Replayed from {found.start}, {verdict.sentence}: the cause is not in flags, "
        "code or data; it was a transient fault, such as of a machine or its memory "
        f"({repeat} the logged loss and norm of that step)"
    )


def repeats(side: Named, step: Step, record: Path) -> bool:
    """Return whether a replay has the loss and the norm that the run logged."""
    recorded = json.loads((record / "step.json").read_text())
    line = side.lines.steps.get(step.iteration) or side.lines.log.get(step.iteration) or {}
    norm = line.get("norm", line.get("grad_norm"))
    return bool(line.get("loss") == recorded["loss"] and norm in (None, recorded["norm"]))


def flags(found: Outcome) -> str:
    """Return the settings that differ, as flags."""
    lines = []
    for name, (one, other) in found.settings.items():
        flag = name if "." not in name else flag_of(name)
        known = "_digest" in name or "_sketch" in name
        lines.append(flag if known else f"{flag} {short(one)} and {short(other)}")
    return first_of(lines, 4)


def short(value: Any) -> str:
    """Return a setting's value as text, truncated."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


if __name__ == "__main__":
    sys.exit(main())
