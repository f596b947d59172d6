# SPDX-License-Identifier: Apache-2.0
"""Read the command line that a run's folder records, which is untrusted.

Such a run is replayed only with the flags that affect its computation. A Python file that it names
is code: only those of this program's model/ are run, or one that the user names. Flags for output
paths are left out, in any spelling, and so are flags that start another program. A value must be
valid for its flag.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from training.flags.foreign import uses_of

RANKS = 16  # most processes that a folder may ask for
WORDS, LONGEST = 10_000, 1 << 16  # most words of a command line; most characters of one
PRODUCT = {"pretrain_llama", "training", "model", "mpu", "tools"}
READ = {  # flags that name a file or directory which a run reads
    "--load", "--pretrained-checkpoint", "--branch-from", "--data-args-path", "--data-stages",
    "--tokenizer-model", "--vocab-file", "--merge-file",
}  # fmt: skip
UNLIKE = {"log", "rehearse"}  # groups of flags that do not affect the computation
OTHER = {"--dry-run", "--wandb-project", "--wandb-exp-name"}


def enter(tree: Path) -> None:
    """Make this process, which was forked for that, import the product from a checkout."""
    here = Path(__file__).resolve().parents[2]
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != here]
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] in PRODUCT]:
        del sys.modules[name]


def world_of(found: Any, letter: str) -> int:
    """Return a recorded number of processes. Raises ValueError if it is out of range."""
    if type(found) is int and 1 <= found <= RANKS:
        return found
    text = f"{found:,}" if type(found) is int else "no number"
    raise ValueError(
        f"its number of processes, {text}, must be from 1 to {RANKS}: give --ranks-{letter.lower()}"
    )


def flags_of(argv: Sequence[str], tree: Path, letter: str, own: Path | None) -> tuple[str, ...]:
    """Return the flags of a recorded command line for a replay of its run.

    own: the model's file, if the user names one. Another process parses the flags, as this one must
    not import a checkout. Raises ValueError, with the reason, if the run cannot be replayed.
    """
    if len(argv) > WORDS or any(len(word) > LONGEST for word in argv):
        raise ValueError("its recorded command line is too long")
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        try:
            found = process.submit(_flags_of, tuple(argv), tree, letter, own).result()
        except BrokenProcessPool:
            raise ValueError("its command line cannot be read") from None
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _flags_of(
    argv: tuple[str, ...], tree: Path, letter: str, own: Path | None
) -> tuple[str, ...] | str:
    """Return the flags, or why there are none."""
    try:
        enter(tree)
        return _kept(argv, tree, letter, own)
    except (Exception, SystemExit) as error:
        return f"its command line: {error}"


def _kept(argv: tuple[str, ...], tree: Path, letter: str, own: Path | None) -> tuple[str, ...]:
    from model.load import load_model_file
    from training.flags import flag_table, foreign
    from training.flags.parse import build_parser

    own_names: frozenset[str] = frozenset()
    kept = list[str]()
    if own is not None:
        extra = getattr(load_model_file(str(own)), "extra_args_provider", None)
        own_names = build_parser(extra).own_names
    found, known = foreign.in_our_words(argv, own_names), flag_table.live_flags()
    for use in found.accepted:  # they have no effect on values, and a rule may require them
        kept += use.words
    for use in uses_of(found.words):
        name, values = use.name, list(use.values)
        if not name:
            raise ValueError(f"{use.value[:80]}: a value without a flag")
        if name in own_names:
            kept += [name, *values]
            continue
        name, *more = known[name].alias_of or (name,)
        flag, values = known[name], [*more, *values]
        if name == "--model-file":
            kept += [] if own is not None else [name, _shipped(values, tree, letter)]
        elif flag.group in UNLIKE or name in OTHER:
            continue
        elif flag.rule.metavar not in ("FILE", "DIRECTORY") or name in READ:
            kept += [name, *_checked(name, values, flag, flag.kind == flag_table.LIVE_KIND)]
    return (*kept, "--model-file", str(own)) if own is not None else tuple(kept)


def _checked(name: str, values: list[str], flag: Any, live: bool) -> list[str]:
    """Return a flag's values. Raises ValueError if one is invalid, or is itself a flag."""
    least, most = {None: (1, 1), "?": (0, 1), 0: (0, 0)}.get(flag.rule.nargs, (0, WORDS))
    if not least <= len(values) <= most:
        raise ValueError(f"{name} has {len(values)} values")
    if any(value.startswith("--") for value in values):
        raise ValueError(f"{name} has a flag as its value")
    if values and live:
        several = flag.rule.nargs == "*"
        flag.read([values] if flag.rule.repeated else values if several else values[0])
    return values


def _shipped(values: list[str], tree: Path, letter: str) -> str:
    """Return model/NAME.py, a model's file of a checkout. Raises ValueError for any other."""
    at = (tree / values[-1]).resolve() if values else tree
    if at.parent != (tree / "model").resolve() or at.suffix != ".py" or not at.is_file():
        name = values[-1] if values else ""
        raise ValueError(
            f"--model-file {name}, which the folder names, is code: if you trust that file, give "
            f"--model-file-{letter.lower()} {name}"
        )
    return f"model/{at.name}"
