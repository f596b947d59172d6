# SPDX-License-Identifier: Apache-2.0
"""Find the newest complete checkpoint, the same on every rank, and report why newer ones are not.

A complete one has a name that only finished saves get, a manifest, and files with the sizes and
hashes in it. The ranks share the hashing, each file once. A checkpoint that is valid but of another
model is refused, not skipped: an older one would be of that model too.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpu.grid import Grid
from training.checkpoint.agree import Outcome, first_error, together
from training.checkpoint.errors import CheckpointError, MismatchError
from training.checkpoint.huggingface import CONFIG, HuggingFaceDirectory, instead, is_model
from training.checkpoint.load import Checkpoint
from training.checkpoint.manifest import MANIFEST, STEP, holds_a_save
from training.checkpoint.pieces import NamedPiece
from training.files.untrusted import first_of, folders_below, nothing_downloaded

FOREIGN_MEGATRON = ("latest_checkpointed_iteration.txt", ".metadata", "common.pt", "modelopt_state")


@dataclass(frozen=True)
class Roots:
    """Several directories with checkpoints of one run; the newest of all of them is taken.

    after: consider later steps only.
    """

    paths: Sequence[str]
    after: int = -1

    def __str__(self) -> str:
        return " or ".join(self.paths)

    def candidates(self, step: int | None, flag: str) -> tuple[list[str], list[str]]:
        """Return candidates() of all directories; of equal steps, that of the first comes first."""
        found: list[tuple[int, str]] = []
        leftovers = []
        for path in self.paths:
            names, unfinished = candidates(Path(path), step, flag)
            leftovers += unfinished
            for name in names:
                match = STEP.fullmatch(Path(name).name)
                found.append((int(match[1]) if match else -1, name))
        found.sort(key=lambda pair: -pair[0])
        # -1: a Hugging Face directory, which is no step
        later = [name for number, name in found if number > self.after or number < 0]
        return later, leftovers


def find_latest(
    root: str | os.PathLike[str] | Roots,
    grid: Grid,
    *,
    flag: str = "--load",
    pieces: Sequence[NamedPiece] = (),
    expect: Mapping[str, Any] | None = None,
    suits: Callable[[Checkpoint], None] = lambda checkpoint: None,
    from_hf: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    step: int | None = None,
    cast: bool = False,
    note: Callable[[str], None] = print,
    device: torch.device | None = None,
) -> Checkpoint | None:
    """Return the newest complete checkpoint under `root` (or at it, a step's directory), or None.

    root: a directory, or several.
    flag: the flag that named `root`, for messages.
    pieces: what this rank will load; their files are hashed, their shapes and dtypes compared
        (`cast` lets dtypes differ).
    expect: the model's hf_config; its fields are compared.
    suits: a further check; raises MismatchError, or CheckpointError to skip the checkpoint.
    from_hf: converts any Llama's config.json to the form of our hf_config.
    step: consider this step only.
    note: called on rank 0 with a line for each newer directory that is skipped.
    Raises, on every rank: MismatchError for another model; CheckpointError if there are
    checkpoints but none is complete, if `step` is missing, and for those of other programs.
    """
    roots = root if isinstance(root, Roots) else Roots([str(root)])

    def look() -> Sequence[list[str]]:
        return roots.candidates(step, flag) if grid.rank == 0 else ()

    outcomes = together(look, grid.world, device)
    failed = first_error(outcomes)
    if failed is not None:
        raise CheckpointError(failed.error)
    names, leftovers = outcomes[0].value

    def report(line: str) -> None:
        if grid.rank == 0:
            note(line)

    for name in leftovers:
        report(f"checkpoint {name} is skipped: its save did not finish")
    for i, name in enumerate(names):

        def read(directory: Path = Path(name)) -> Checkpoint:
            checkpoint = open_checkpoint(directory, from_hf)
            checkpoint.check_model(expect or {}, from_hf)
            suits(checkpoint)
            checkpoint.check_tensors(pieces, cast)
            return checkpoint

        found = _verified(read, grid, pieces, device)
        if isinstance(found, Checkpoint):
            found.passed_over = names[:i]
            return found
        if found.mismatch:
            raise MismatchError(f"{flag}: {found.error}")
        failed = found
        report(f"checkpoint {name} is skipped: rank {failed.rank}: {failed.error}")
    if names:
        raise CheckpointError(
            f"{flag} {root}: none of its {len(names)} checkpoints can be loaded (the last, "
            f"{Path(names[-1]).name}: {failed.error if failed else ''}); move them away to start "
            "afresh"
        )
    return None


def open_checkpoint(
    directory: Path, from_hf: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Checkpoint:
    """Open a checkpoint of this program or a Hugging Face directory.

    Raises CheckpointError; for the latter, a MismatchError.
    """
    there = os.listdir(directory) if directory.is_dir() else []
    if MANIFEST in there or not is_model(there):
        return Checkpoint(directory)
    try:
        return HuggingFaceDirectory(directory, from_hf)
    except CheckpointError as error:  # there is no older one to take instead
        raise MismatchError(str(error)) from None


def _verified(
    read: Callable[[], Checkpoint],
    grid: Grid,
    pieces: Sequence[NamedPiece],
    device: torch.device | None,
) -> Checkpoint | Outcome:
    """Read a checkpoint and hash the files that any rank will load, each on one of the ranks.

    Return the same on every rank: the checkpoint, or the first failure.
    """
    opened: list[Checkpoint] = []

    def check() -> tuple[str, list[str], str]:
        checkpoint = read()
        opened.append(checkpoint)
        needed = set(checkpoint.files_of(pieces))
        if grid.rank == 0:
            checkpoint.check_sizes()
            # and the files stored next to the tensors
            needed |= {n for n in checkpoint.manifest["files"] if not n.endswith(".safetensors")}
        bits = "".join("01"[name in needed] for name in sorted(checkpoint.manifest["files"]))
        names = names_to_report(pieces) if isinstance(checkpoint, HuggingFaceDirectory) else []
        return bits, names, checkpoint.manifest.get("digest", "")

    outcomes = together(check, grid.world, device)
    failed = first_error(outcomes)
    if failed is None and len({o.value[2] for o in outcomes}) > 1:
        failed = Outcome(0, error="it was replaced while the ranks opened it")
    if failed is None:
        (checkpoint,) = opened
        files = checkpoint.manifest["files"]
        requested = zip(*(o.value[0] for o in outcomes), strict=True)  # one column a file
        readers = dict(zip(sorted(files), requested, strict=True))
        loads, mine = [0] * grid.world.size, []
        for name in sorted(files, key=lambda name: -files[name]["size"]):
            ranks = [rank for rank, bit in enumerate(readers[name]) if bit == "1"]
            if ranks:  # one of those that load it hashes it, which puts it into its host's cache
                rank = min(ranks, key=loads.__getitem__)
                loads[rank] += files[name]["size"]
                mine += [name] if rank == grid.world.rank else []
        model = {name for o in outcomes for name in o.value[1]}

        def verify() -> None:
            if not isinstance(checkpoint, HuggingFaceDirectory):
                return checkpoint.verify(mine)
            try:
                if model:  # else nothing is loaded yet
                    checkpoint.check_names(model)
                checkpoint.verify(mine)
            except CheckpointError as error:  # there is no older one to take instead
                raise MismatchError(str(error)) from None

        failed = first_error(together(verify, grid.world, device))
    return failed or opened[0]


def names_to_report(pieces: Sequence[NamedPiece]) -> list[str]:
    """Return the tensors whose first element this rank holds, as the first of its holders.

    So in every layout one rank reports each name, even if weights are sharded.
    """
    first = (p for p in pieces if not any(p.starts) and not any(a.rank for a in p.holders))
    return [piece.name for piece in first]


def is_hugging_face(
    root: str | os.PathLike[str] | Roots, grid: Grid, device: torch.device | None = None
) -> bool:
    """Return, the same on every rank, whether `root` is a Hugging Face directory."""
    if isinstance(root, Roots):
        return False
    found = together(lambda: (Path(root) / CONFIG).is_file(), grid.world, device)[0].value
    return bool(found)


def later_steps(root: Path, step: int, except_for: Sequence[str] = ()) -> list[str]:
    """Return the names of later steps' directories with files of the right sizes, oldest first.

    except_for: directories to leave out.
    """
    found, known = [], {Path(name).resolve() for name in except_for}
    for name in reversed(candidates(root, None, "--save")[0]):
        match = STEP.fullmatch(Path(name).name)
        if match is None or int(match[1]) <= step or Path(name).resolve() in known:
            continue
        with suppress(CheckpointError):
            Checkpoint(Path(name)).check_sizes()
            found.append(Path(name).name)
    return found


def candidates(root: Path, step: int | None, flag: str = "--load") -> tuple[list[str], list[str]]:
    """Return the directories that might be loaded, newest first, and newer unfinished saves.

    Raises CheckpointError if `root` is no directory, is another program's, or lacks `step`.
    """

    def itself() -> tuple[list[str], list[str]]:
        real = root.resolve()
        match = STEP.fullmatch(real.name)
        if step is not None and (match is None or int(match[1]) != step):
            raise CheckpointError(
                f"--ckpt-step {step}: {flag} {root} is a single checkpoint, not of this step: "
                "leave out --ckpt-step, or give the folder of a run"
            )
        return [str(real)], []

    if not os.path.lexists(root):
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: {root} does not exist")
        return [], []
    if not root.is_dir():
        raise CheckpointError(f"{flag} {root} is not a directory")
    if (root / MANIFEST).exists() or STEP.fullmatch(root.name):
        return itself()
    entries = sorted(entry.name for entry in os.scandir(root))
    refuse_foreign(root, entries, flag)
    if CONFIG in entries:  # Hugging Face's
        return itself()
    found: list[tuple[int, bool, str]] = []
    leftovers = []
    for name in entries:
        match = STEP.fullmatch(name)
        if match and not (root / name).is_symlink():
            found.append((int(match[1]), match[2] is None, str(root / name)))
        elif match:
            leftovers.append(f"{root / name} (a link)")
        elif STEP.fullmatch(name.partition(".tmp-")[0]):
            leftovers.append(str(root / name))
    found.sort(reverse=True)
    if not found and is_model(entries):  # its reader reports what is wrong
        return itself()
    if step is not None:
        have = sorted({n for n, _, _ in found})
        found = [f for f in found if f[0] == step]
        if not found:
            raise CheckpointError(f"--ckpt-step {step}: {root} has the steps {have}, not this one")
    first = found[0][2] if found else ""
    return [path for _, _, path in found], [name for name in leftovers if name > first]


def below(root: str | os.PathLike[str]) -> list[str]:
    """Return the folders below `root` that hold a run's checkpoints or, if there are none, Hugging
    Face models.
    """
    runs = {str(Path(step).parent) for step in folders_below(root, MANIFEST)}
    runs = {run for run in runs if Path(run) != Path(root)}
    return sorted(runs) or folders_below(root, CONFIG)


def at_or_below(root: str | os.PathLike[str], flag: str = "--load") -> Path:
    """Return `root` if it holds checkpoints, else the one folder below it that does; `root` if no
    folder does. Raises CheckpointError if several do.
    """
    root = Path(root)
    if not root.is_dir() or candidates(root, None, flag)[0]:
        return root
    found = below(root)
    if len(found) > 1:
        raise CheckpointError(f"{flag} {root}: {why_none(root)}")
    return Path(found[0]) if found else root


def why_none(root: str | os.PathLike[str]) -> str:
    """Return why no checkpoint is at `root`: there are some below it, it has files of another
    program, or nothing is downloaded.
    """
    if found := below(root):
        return f"checkpoints are in folders below it: give one, such as {first_of(found)}"
    with suppress(OSError):
        if others := instead(sorted(os.listdir(root))):
            return f"it has {others}"
    return nothing_downloaded(root)


def nothing_at(flag: str, root: str | os.PathLike[str]) -> CheckpointError:
    """Return the error for a flag that names a directory without a checkpoint."""
    return CheckpointError(f"{flag} {root}: no checkpoint there ({why_none(root)})")


def places(
    load: str | None, branch_from: str | None, step: int | None, pretrained: str | None = None
) -> list[tuple[str, Path, int | None]]:
    """Return (flag, directory, --ckpt-step) for each place to look for a checkpoint, in order.

    step applies to branch_from if it is given, else to load.
    """
    flags = {
        "--load": (load, None if branch_from else step),
        "--branch-from": (branch_from, step),
        "--pretrained-checkpoint": (pretrained, None),
    }
    return [(flag, Path(root), step) for flag, (root, step) in flags.items() if root is not None]


def newest(
    flag: str, root: Path, step: int | None, refused: list[CheckpointError] | None = None
) -> Checkpoint | None:
    """Return the newest checkpoint that can be opened; find_latest later reports skipped ones.

    refused: a list to which the errors of those that cannot be opened are added.
    """
    for name in candidates(root, step, flag)[0]:
        try:
            return open_checkpoint(Path(name))
        except CheckpointError as error:
            if refused is not None:
                refused.append(error)
    return None


def resumed(
    load: str | None, branch_from: str | None, step: int | None, finetune: bool | None
) -> Checkpoint | None:
    """Return the checkpoint whose order of samples a run continues, None if it starts a new one.

    The arguments are flags; step is --ckpt-step.
    """
    where = [] if finetune else places(load, branch_from, step)
    opened = (newest(*place) for place in where)
    found = next(filter(None, opened), None)
    consumed = found.state.get("consumed_samples") if found else None
    return found if type(consumed) is int and consumed > 0 else None


def refuse_to_save(root: Path, flag: str) -> None:
    """Raise CheckpointError if `root` has contents among which no checkpoints may be saved.

    That is so if `root` is a checkpoint or a folder in one, or if it holds a Hugging Face model,
    which a resume would load instead, or a Megatron-LM checkpoint.
    """
    real = root.resolve()
    for place in (real, *real.parents):
        if (place / MANIFEST).is_file() and STEP.fullmatch(place.name):
            where = "is" if place == real else f"lies in {place}, which is"
            raise CheckpointError(f"{flag} {root} {where} a checkpoint: give a folder of a run")
    if not real.is_dir():
        return
    refuse_foreign(root, sorted(os.listdir(real)), flag)
    if (real / CONFIG).is_file():
        raise CheckpointError(
            f"{flag} {root} holds a Hugging Face model ({CONFIG}), which a resume would load "
            "in place of the run's checkpoints: give another directory"
        )


def not_saved(root: Path, step: int) -> list[str]:
    """Return the names of later steps' directories that a save would use, but no save wrote."""
    found = ((STEP.fullmatch(name), name) for name in sorted(os.listdir(root)))
    later = [name for match, name in found if match and not match[2] and int(match[1]) > step]
    return [name for name in later if not holds_a_save(root / name)]


def refuse_foreign(root: Path, entries: Sequence[str], flag: str) -> None:
    """Raise CheckpointError for a directory of Megatron-LM; the message says how to convert it.

    Also for a model's directory in Hugging Face's cache, where a snapshot must be named instead.
    """
    if {"blobs", "snapshots"} <= set(entries):
        made = sorted(str(path) for path in (root / "snapshots").glob("*"))
        raise CheckpointError(
            f"{flag} {root} is a model in Hugging Face's cache: give one of its snapshots"
            + (f", such as {made[0]}" if made else ", of which there is none")
        )
    megatron = [
        name
        for name in entries
        if name in FOREIGN_MEGATRON
        or name.startswith(("mp_rank_", "iter_"))
        or name.endswith(".distcp")
    ]
    if megatron:
        raise CheckpointError(
            f"{flag} {root} holds a Megatron-LM checkpoint ({megatron[0]}), not read here: "
            "convert it with tools/checkpoint.py convert --from-mcore (format torch_dist), or to "
            "Hugging Face format with Megatron's own tools, and load that"
        )
