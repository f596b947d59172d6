# SPDX-License-Identifier: Apache-2.0
"""Choose which checkpoints are kept, and remove the others so that a kill cannot do harm.

The newest checkpoints are kept, down to the K-th complete one; older ones are removed, except for
the steps that --save-retain-interval keeps. Complete means checked: this run wrote or verified the
directory, or hashes all its files now, and in both cases its files have the right sizes now. A
damaged one does not count and, among the newest, is kept for inspection. So with fewer than K
complete ones no step is removed, and the only complete one never is. (A directory that was set
aside is removed if its successor counts.)

The complete one with the lowest loss on held-out data is kept too (evaluated.py). One that was
saved for its loss alone is removed once another one has a lower loss and a newer one is complete.

A directory is first renamed to step_00000123.trash-<random>, which is never loaded, then removed.
One that holds anything that no save wrote stays as it is (`holds_a_save`). One rank does all this,
without a message to the others.
"""

import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from training.checkpoint.errors import CheckpointError
from training.checkpoint.evaluated import Evaluation, evaluation_of
from training.checkpoint.files import Hook
from training.checkpoint.load import Checkpoint
from training.checkpoint.manifest import MANIFEST, STATE, STEP, holds_a_save
from training.files.owned import set_aside

Note = Callable[[str], None]

# a save was killed, or the probe for one (save.py)
UNFINISHED = re.compile(r"(step_\d{8,}\.tmp|\.probe)-[0-9a-f]+")
TRASH = re.compile(r"step_\d{8,}\.trash-[0-9a-f]+")  # a removal is in progress, or was killed
# a small file that was to be renamed or removed
SMALL = re.compile(r"\.(latest|save_hf\.json)-[0-9a-f]+")


def prune(
    root: Path,
    keep_last: int | None,
    retain_interval: int | None,
    good: set[str],
    note: Note,
    hook: Hook = lambda phase: None,
    among: Collection[str] | None = None,
    outdone: bool = False,
) -> list[str]:
    """Remove the checkpoints under `root` that are not kept; return their names, oldest first.

    keep_last: how many of the newest complete ones are kept. retain_interval: multiples of it are
        kept too; without keep_last, which then is 1, it has Megatron-LM's meaning: only multiples
        and the last are kept. Both None: nothing is removed, except by `outdone`.
    good: names known to be complete, as this run wrote or verified them; those verified here are
        added, so that the next call does not hash them again.
    note: called with a line for each damaged checkpoint and failed removal; neither is an error.
    hook(phase): "pruning" before each removal, "trash" once its directory is renamed.
    among: names of the directories to consider; None: all.
    outdone: if keep_last and retain_interval are None, remove checkpoints that were saved for a
        loss that is no longer the lowest, and no others. Otherwise they are removed in any case.
    """
    try:
        left = [name for name in os.listdir(root) if TRASH.fullmatch(name)]
        _clear(root, [name for name in left if holds_a_save(root / name)], note)
        doomed = choose(root, keep_last, retain_interval, good, note, among=among, outdone=outdone)
    except OSError as error:
        note(f"no checkpoint was removed: {error.strerror}: {error.filename}")
        return []
    removed = []
    for name in doomed:
        hook("pruning")
        trash = f"{name.partition('.')[0]}.trash-{secrets.token_hex(8)}"
        try:
            set_aside(root / name, root / trash, holds_a_save)
        except OSError as error:
            note(f"checkpoint {root / name} was not removed: {error.strerror}")
            continue
        good.discard(name)
        removed.append(name)
        hook("trash")
        _clear(root, [trash], note)
    return removed


def choose(
    root: Path,
    keep_last: int | None,
    retain_interval: int | None,
    good: set[str],
    note: Note,
    among: Collection[str] | None = None,
    outdone: bool = False,
) -> list[str]:
    """Return the names of the checkpoints that prune() would remove, oldest first."""
    others_stay = keep_last is None and retain_interval is None
    if others_stay and not outdone:
        return []
    window = 1 if keep_last is None else keep_last
    assert window >= 1
    found = {n: e for n, (_, e) in evaluations(root).items() if among is None or n in among}
    for_loss = {name for name, each in found.items() if each.only}
    best = best_of(root, found, good, note)
    doomed: list[str] = []
    counted: list[int] = []  # steps of the complete ones found so far
    for step, _, name in reversed(step_directories(root)):
        if among is not None and name not in among:
            continue
        if counted and counted[-1] == step:  # set aside for a successor, which is complete
            doomed.append(name)
        elif len(counted) < window:
            try:
                check_complete(root / name, good)
                counted.append(step)
            except (CheckpointError, OSError) as error:
                note(f"checkpoint {root / name} is left in place and not counted: {error}")
        elif name in best:
            continue
        elif name in for_loss or not (
            others_stay or (retain_interval and step % retain_interval == 0)
        ):
            doomed.append(name)
    foreign = [name for name in doomed if not holds_a_save(root / name)]
    for name in foreign:
        note(f"checkpoint {root / name} is left in place: it holds files that no save wrote")
    return [name for name in doomed[::-1] if name not in foreign]


def evaluations(root: Path) -> dict[str, tuple[int, Evaluation]]:
    """Return {name: (step, evaluation)} of the checkpoints under `root` that have one.

    For a step that was saved again it is the newer one's.
    """
    found = {}
    for step, final, name in step_directories(root):
        if final or not (root / name.partition(".old-")[0]).is_dir():
            if (evaluation := evaluation_of(root / name)) is not None:
                found[name] = step, evaluation
    return found


def best_of(root: Path, found: Mapping[str, Evaluation], good: set[str], note: Note) -> set[str]:
    """Return the names of the complete checkpoints with the lowest loss on each held-out set.

    Also damaged ones with lower losses, which stay in place; `note` is called for each of them.
    """
    stay, known = set(), set()
    for name, each in sorted(found.items(), key=lambda pair: (pair[1].loss, pair[0])):
        if each.comparable in known:
            continue
        stay.add(name)
        try:
            check_complete(root / name, good)
            known.add(each.comparable)
        except (CheckpointError, OSError) as error:
            note(f"checkpoint {root / name} is left in place and is not the best: {error}")
    return stay


def step_directories(root: Path) -> list[tuple[int, bool, str]]:
    """List (step, whether it has its final name, name) under `root`, oldest first."""
    found = []
    for entry in os.scandir(root):
        match = STEP.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append((int(match[1]), match[2] is None, entry.name))
    return sorted(found)


def check_complete(directory: Path, good: set[str]) -> None:
    """Raise CheckpointError unless a checkpoint's files have their sizes and hashes.

    A directory named in `good` is not hashed; one that passes is added to `good`.
    """
    checkpoint = Checkpoint(directory)
    checkpoint.check_sizes()
    if directory.name not in good:
        checkpoint.verify(checkpoint.manifest["files"])
        good.add(directory.name)


def clear_rubbish(root: Path, good: set[str], note: Note) -> None:
    """Remove the leftovers of killed saves under `root`. No other save may be writing there.

    Directories that prune() renamed stay: a thread may be removing them, and a save does not wait.
    A directory set aside (.old-) is rubbish where its successor is complete; without one it is the
    checkpoint of its step.
    """
    rubbish = []
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            stem, dot, _ = entry.name.partition(".old-")
            if not holds_a_save(root / entry.name):
                continue
            if UNFINISHED.fullmatch(entry.name):
                rubbish.append(entry.name)
            elif dot and STEP.fullmatch(entry.name):
                try:
                    check_complete(root / stem, good)
                    rubbish.append(entry.name)
                except (CheckpointError, OSError):
                    pass
        elif SMALL.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            rubbish.append(entry.name)
    _clear(root, rubbish, note)


def _clear(root: Path, names: list[str], note: Note) -> None:
    for name in names:
        try:
            if (root / name).is_dir() and not (root / name).is_symlink():
                # holds_a_save() needs these two if a kill comes in between
                order = {STATE: 1, MANIFEST: 2}
                for file in sorted(os.listdir(root / name), key=lambda n: order.get(n, 0)):
                    os.unlink(root / name / file)
                os.rmdir(root / name)
            else:
                os.unlink(root / name)
        except OSError as error:
            note(f"{root / name} could not be removed: {error.strerror}: {error.filename}")
