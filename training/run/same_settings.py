# SPDX-License-Identifier: Apache-2.0
"""Compare the flags, the data, the sources and the versions of all ranks before they connect.

It needs no collective: each rank tells rank 0 a digest through the store at which the ranks meet.
"""

import hashlib
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpu.launch import Launch
from training.faults.activity import Activity
from training.faults.store import await_key, late_ranks, poll
from training.faults.wire import PRINTED
from training.files.untrusted import printable
from training.flags.flag_table import live_flags
from training.run.rendezvous import ABSENT, ACKNOWLEDGED, MARGIN, RendezvousError
from training.settings.config import Config, UsageError

COMPARING = 60.0  # seconds, at most, that ranks which have met wait for one another
# what runs: the sources of these rooms
ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("mpu", "model", "training", "csrc")
KINDS = (".py", ".cpp", ".cc", ".c", ".h", ".cu")


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return {"the file mpu/grid.py": hash, ..., "the version of torch": "2.13.0"}.

    Ranks that differ in one of them may compute different numbers, or wait for each other in
    different places. It takes some 10 ms.
    """
    files = [root / "pretrain_llama.py"]
    for room in ROOMS:
        files += [path for path in sorted((root / room).rglob("*")) if path.suffix in KINDS]
    found = {}
    for path in files:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        found[f"the file {path.relative_to(root).as_posix()}"] = digest
    versions = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
    }
    return found | {f"the version of {name}": text for name, text in versions.items()}


def compare(
    config: Config,
    digests: dict[str, str],
    launch: Launch,
    store: dist.Store,
    activity: Activity | None = None,
) -> None:
    """Raise UsageError, on every rank, where flags or data differ between ranks.

    It needs no collective. digests: {name in messages: hash} of whatever else must be the same.
    Raises RendezvousError where a rank has left since it met the others, or does not go on.
    """
    settings = json.loads(config.canonical_json()) | digests | sources()
    settings["whether WEFT_SECRET is set"] = bool(launch.point.secret)
    mine = json.dumps(settings, sort_keys=True)
    try:
        _exchange(mine, launch, store, activity or Activity(launch))
    except RuntimeError as error:
        why = printable(str(error).splitlines()[0])
        raise RendezvousError(
            f"a rank ended before all ranks had compared their settings: {why}"
        ) from None


def digest_of(settings: str) -> str:
    """Return what a rank tells of its settings, unless it is asked for them."""
    return hashlib.sha256(settings.encode()).hexdigest()


def _exchange(mine: str, launch: Launch, store: dist.Store, activity: Activity) -> None:
    """Send a digest of every rank's settings to rank 0, which asks the first that differs for all
    of them; raise UsageError, on every rank, if they differ.

    Raises RendezvousError, on every rank, where some send none in time.
    """
    rank, world, deadline = launch.rank, launch.world, time.monotonic() + COMPARING
    if rank == 0:
        odd, verdict = _collected(mine, launch, store, activity), ""
        store.set("start/ask", odd)
        if odd and not odd.startswith(ABSENT):
            settings = await_key(
                store, f"start/whole/{odd}", deadline + MARGIN,
                lambda: RendezvousError(f"rank {odd} connected and then ended"), activity=activity,
                wait="start", what=f"rank {odd}, to send its settings", by=int(odd),
            )  # fmt: skip
            verdict = _difference(mine, settings, int(odd))
            store.set("start/verdict", verdict)
    else:

        def from_rank_0(key: str, until: float) -> str:
            return await_key(
                store, key, until, lambda: RendezvousError("rank 0 connected and then ended"),
                activity=activity, wait="start", what="rank 0, to compare the ranks' settings",
            )  # fmt: skip

        store.set(f"start/{rank}", digest_of(mine))
        odd, verdict = from_rank_0("start/ask", deadline + MARGIN), ""
        if odd == str(rank):
            store.set(f"start/whole/{rank}", mine)
        if odd and not odd.startswith(ABSENT):
            verdict = from_rank_0("start/verdict", deadline + 3 * MARGIN)
    if odd.startswith(ABSENT):
        raise RendezvousError(printable(odd.removeprefix(ABSENT)), reported=True)
    if not verdict:
        return
    acknowledged, deadline = store.add("start/heard", 1), time.monotonic() + ACKNOWLEDGED
    while rank == 0 and acknowledged < world and time.monotonic() < deadline:
        time.sleep(0.05)  # rank 0 may be the store itself
        acknowledged = store.add("start/heard", 0)
    raise UsageError(printable(verdict, most=PRINTED))


def _collected(mine: str, launch: Launch, store: dist.Store, activity: Activity) -> str:
    """Return the first rank whose settings differ from rank 0's, "" if none, or ABSENT and which
    ranks sent none in time.
    """
    others, told, odd = range(1, launch.world), list[int](), ""

    def missing() -> list[int]:
        return [rank for rank in others if not store.check([f"start/{rank}"])]

    def now() -> str:
        late = missing()
        told[:] = told or late
        who = late_ranks(late, store, launch)
        return f"waiting for {who}, to send the settings of the run" if late else ""

    with activity.waiting(
        "waiting for the settings of all ranks",
        now,
        limit=COMPARING,
        over=lambda: "" if missing() else f"{late_ranks(told, store, launch)} sent settings",
        on_line=lambda: store.set("late/start", ""),
    ):
        deadline = time.monotonic() + COMPARING
        for other in others:
            theirs = poll(store, f"start/{other}", deadline)
            if theirs is None:
                who = late_ranks(missing() or [other], store, launch)
                return f"{ABSENT}{who} connected and then sent no settings in {COMPARING:.0f} s"
            odd = odd or (str(other) if theirs != digest_of(mine) else "")
    return odd


def _difference(mine: str, theirs: str, other: int) -> str:
    """Return how rank `other` differs from rank 0, in one sentence, or "" where it does not."""
    different = differing(json.loads(mine), json.loads(theirs))
    if not different:
        return ""
    key = min(different, key=lambda key: (not key.startswith("the "), key))  # code first
    here, there = different[key]
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    name = flag if flag in live_flags() else key
    if key.startswith("the file "):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        return f"{key} differs on rank 0 and rank {other}{more}: all must run the same code"
    return (
        f"{name} is {here!r} on rank 0 and {there!r} on rank {other}: all ranks need the same value"
    )


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two ranks differ: {name: (in a, in b)}."""
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}
