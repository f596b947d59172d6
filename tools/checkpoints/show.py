# SPDX-License-Identifier: Apache-2.0
"""List the checkpoints of a run, verify them, and show the contents of one."""

import re
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tools.checkpoints.diff import flatten
from training.checkpoint import Checkpoint, CheckpointError
from training.checkpoint.header import BY_NAME
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.manifest import MANIFEST
from training.checkpoint.retain import TRASH, UNFINISHED, evaluations, step_directories
from training.run.text import aligned, in_units
from training.run.waiting import waiting

WRITER = re.compile(r"rank_(\d+)-\d+\.safetensors")
PROGRESS = ("consumed_samples", "consumed_tokens", "optimizer_steps")


def layout_of(state: dict[str, Any]) -> str:
    """Return the layout of the run that saved: its ranks, and its axes of more than one rank."""
    layout = state.get("layout", {})
    axes = [f"{axis} {n}" for axis, n in layout.items() if axis != "world_size" and n > 1]
    ranks = layout.get("world_size", 1)
    return ", ".join([f"{ranks} rank" + "s" * (ranks != 1), *axes])


def saved_at(directory: Path) -> str:
    """Return when a checkpoint's manifest, or a Hugging Face config, was written."""
    for name in (MANIFEST, "config.json"):
        if (directory / name).exists():
            when = time.localtime((directory / name).stat().st_mtime)
            return time.strftime("%Y-%m-%d %H:%M", when)
    return ""


def list_steps(root: Path) -> Iterator[str]:
    """Yield a table of the checkpoints under `root`; their files are checked by size.

    Checkpoints of --keep-best have their losses, too.
    """
    losses = {name: evaluation for name, (_, evaluation) in evaluations(root).items()}
    in_order = sorted(losses, key=lambda name: (losses[name].loss, name), reverse=True)
    lowest = {losses[name].comparable: name for name in in_order}.values()
    rows: list[tuple[str, ...]] = []
    rows.append(("step", "saved", "samples", "tokens", "size", "written by", "files"))
    for _, final, name in step_directories(root):
        row = [name.removeprefix("step_").lstrip("0") or "0", saved_at(root / name)]
        try:
            found = Checkpoint(root / name)
            progress = [found.state.get(f"consumed_{what}") for what in ("samples", "tokens")]
            row += [f"{n:,}" if isinstance(n, int) else "" for n in progress]
            row += [in_units(bytes_of(found)), layout_of(found.state)]
            found.check_sizes()
            there = "all there" if final else "all there, set aside"
            if (evaluation := losses.get(name)) is not None:
                of = evaluation.set and f"-{evaluation.set}"
                there += f"; validation{of} loss {evaluation.loss:.4f}"
                there += ", the lowest" * (name in lowest)
            row.append(there)
        except (CheckpointError, OSError) as error:
            row += [""] * (6 - len(row)) + [f"DAMAGED: {error}"]
        rows.append(tuple(row))
    for name in leftovers(root):
        kind = "unfinished save" if ".tmp-" in name else "unfinished removal"
        rows.append((name.removeprefix("step_").lstrip("0"), "", "", "", "", "", kind))
    if len(rows) == 1:
        raise CheckpointError(f"{root}: there is no checkpoint")
    yield from aligned(rows, left=(1, 5, 6))


def leftovers(root: Path) -> list[str]:
    """Return the names of unfinished saves and removals that were killed."""
    names = (path.name for path in root.iterdir())
    return sorted(name for name in names if UNFINISHED.fullmatch(name) or TRASH.fullmatch(name))


def bytes_of(found: Checkpoint) -> int:
    """Return the total size of a checkpoint's files in bytes."""
    return sum(info["size"] for info in found.manifest["files"].values())


def verify(directories: Sequence[Path]) -> Iterator[tuple[bool, str]]:
    """Hash every file of each checkpoint, read its header and look for non-finite values.

    Yield (whether it is whole, a line about it).
    """
    for directory in directories:
        try:
            found = Checkpoint(directory)
        except (CheckpointError, OSError) as error:
            yield False, f"{directory.name}  DAMAGED  {error}"
            continue
        errors = []
        with waiting(f"hashing {directory.name}") as progress:
            progress.begin("", bytes_of(found), "B")
            for name, info in found.manifest["files"].items():
                try:
                    found.verify_file(name, sha256=True)
                except (CheckpointError, OSError) as error:
                    errors.append(str(error))
                progress.add(info["size"])
        files = f"{len(found.manifest['files'])} files, {in_units(bytes_of(found))}"
        if errors:
            yield False, f"{directory.name}  DAMAGED  " + "; ".join(errors)
        else:
            yield True, f"{directory.name}  complete {files} hashed"


def show(found: Checkpoint, tensors: bool) -> Iterator[str]:
    """Yield lines on a checkpoint: progress, layout, config and, if asked, each tensor."""
    state = found.state
    weights = found.weights()
    optimizer = found.index.keys() - weights
    if isinstance(found, HuggingFaceDirectory):
        rows = [("Hugging Face's", f"saved {saved_at(found.directory)}")]
    else:
        rows = [("step", f"{found.step}, saved {saved_at(found.directory)}")]
        rows += [(key, f"{state[key]:,}") for key in PROGRESS if key in state]
        rows.append(("written by", layout_of(state)))
    rows += [
        ("files", f"{len(found.manifest['files'])}, {in_units(bytes_of(found))}"),
        ("weights", _summary([found.index[name] for name in weights])),
        ("optimizer", _summary([found.index[name] for name in optimizer])),
    ]
    rest = {k: v for k, v in state.items() if k not in (*PROGRESS, "step", "layout", "iteration")}
    rows += [(key, str(value)) for key, value in flatten(rest)]
    yield from aligned(rows, left=(0, 1))
    if tensors:
        yield ""
        table = [("tensor", "dtype", "shape", "bytes", "parts", "in")]
        for name, entry in found.index.items():
            n = prod(entry["shape"]) * BY_NAME[entry["dtype"]].itemsize
            shape, parts = "x".join(map(str, entry["shape"])), str(len(entry["parts"]))
            table.append((name, entry["dtype"], shape, f"{n:,}", parts, _writers(entry)))
        yield from aligned(table, left=(0, 1, 2, 5))


def _summary(entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return "none"
    kinds = sorted({entry["dtype"] for entry in entries})
    numbers = sum(prod(entry["shape"]) for entry in entries)
    return f"{numbers:,} numbers in {len(entries)} tensors, {', '.join(kinds)}"


def _writers(entry: dict[str, Any]) -> str:
    """Return which ranks wrote the parts of a tensor, as ranges, or the files if no ranks did."""
    files = sorted({part[0] for part in entry["parts"]})
    matches = [WRITER.fullmatch(file) for file in files]
    if not all(matches):
        return ", ".join(files)
    ranges: list[list[int]] = []
    for rank in sorted({int(m[1]) for m in matches if m}):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
    return f"rank{'' if text.isdigit() else 's'} {text}"
