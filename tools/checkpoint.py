#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Look at checkpoints, check them, compare, convert, rewrite and prune them.

    python tools/checkpoint.py list runs/llama             which steps, how far, how large
    python tools/checkpoint.py verify runs/llama           hash every file of every step
    python tools/checkpoint.py show runs/llama --tensors   what is in the newest, and who wrote it
    python tools/checkpoint.py diff runs/a runs/b          where two differ, to the bit
    python tools/checkpoint.py convert --from-hf Llama-3.2-1B --save runs/llama
    python tools/checkpoint.py convert --from-mcore ckpt --hf-config Llama-3.2-1B --save runs/llama
    python tools/checkpoint.py convert --upcycle runs/llama --num-experts 8 --save runs/moe
    python tools/checkpoint.py convert --to-hf out --load runs/llama --dtype bfloat16
    python tools/checkpoint.py convert --to-mcore out --load runs/llama
    python tools/checkpoint.py consolidate runs/llama --save runs/whole
    python tools/checkpoint.py prune runs/llama --keep-last-k 2 --save-retain-interval 1000

PLACE is the directory of a step, or of a run, whose newest complete checkpoint is then used and
named; show, diff and convert also take a Hugging Face directory. Every command holds at most one
tensor in memory, whatever the size of the model. Exit codes: 0; 1 if verify finds damage or diff
a difference; 2 for an error, with a sentence that says why.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import torch

from tools.checkpoints.convert_huggingface import export_hf, import_hf
from tools.checkpoints.copy import consolidate, open_newest, warn
from tools.checkpoints.diff import diff
from tools.checkpoints.mcore import import_mcore
from tools.checkpoints.mcore_export import export_mcore
from tools.checkpoints.show import bytes_of, list_steps, show, verify
from tools.checkpoints.upcycle import upcycle
from tools.command_line import Parser, integer
from training.checkpoint import Checkpoint
from training.checkpoint.find import nothing_at, open_checkpoint, refuse_foreign
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.manifest import MANIFEST, STEP
from training.checkpoint.retain import choose, clear_rubbish, prune, step_directories
from training.files.untrusted import owner_only, printable, sentence
from training.run.text import in_units
from training.run.waiting import waiting

Words = dict[str, Any]  # keywords of add_argument
MUST = ("save", "hf_config", "load", "num_experts")  # required with the conversions they belong to
DTYPES = ("float32", "bfloat16", "float16", "float64")


def say(text: str | Path) -> None:
    """Print lines about a checkpoint, without control characters that it may contain."""
    print(printable(str(text), lines=True), flush=True)


def run_directory(root: Path) -> Path:
    """Return `root` if it is a run's directory. Raises ValueError for anything else."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a directory")
    if STEP.fullmatch(root.name) or (root / MANIFEST).exists():
        raise ValueError(f"{root} is one step's directory: give the run's, {root.parent}")
    names = sorted(os.listdir(root))
    refuse_foreign(root, names, "checkpoint")
    if "config.json" in names:
        raise ValueError(f"{root} is a Hugging Face directory: only show, diff and convert read it")
    steps = [name for _, _, name in step_directories(root)]
    if not steps:
        raise nothing_at("checkpoint", root)
    for name in steps:
        there = os.listdir(root / name)
        if MANIFEST not in there and "config.json" in there:  # --save-hf names them so
            read = "only show, diff and convert read it"
            raise ValueError(f"{root / name} is a Hugging Face directory: {read}")
    return root


def do_list(args: argparse.Namespace) -> int:
    """Print the table of a run's checkpoints."""
    say("\n".join(list_steps(run_directory(args.run))))
    return 0


def do_verify(args: argparse.Namespace) -> int:
    """Hash every file; return 1 if one is damaged."""
    place, damaged = args.place, 0
    if STEP.fullmatch(place.name) or (place / MANIFEST).exists():
        steps = [place]
    else:
        steps = [place / name for _, _, name in step_directories(run_directory(place))]
    for intact, line in verify(steps):
        damaged += not intact
        say(line)
    return int(damaged > 0)


def do_show(args: argparse.Namespace) -> int:
    """Print the contents of a checkpoint."""
    found = open_newest(args.place, hashed=False)
    say(found.directory)
    say("\n".join(show(found, args.tensors)))
    return 0


def do_diff(args: argparse.Namespace) -> int:
    """Print the differences; return 1 if there are any."""
    with waiting("opening the checkpoints") as progress:
        a, b = (
            open_newest(place, hashed=True, finite=False, progress=progress)
            for place in (args.a, args.b)
        )
    say(f"A  {a.directory}\nB  {b.directory}")
    with waiting("comparing") as progress:
        lines = list(diff(a, b, args.tensors, progress))
    for line in lines:
        say(line)
    if not lines:
        say(f"all {len(a.index)} tensors are equal to the bit")
    return int(bool(lines))


def do_convert(args: argparse.Namespace) -> int:
    """Convert a model from or to another program's format."""
    if args.upcycle:
        counts = args.num_experts, args.moe_router_topk or 2
        with waiting("converting") as progress:
            read, made = upcycle(args.upcycle, args.save, *counts, seed=1234, progress=progress)
        say(f"{read} -> {made}; continue from it with --load {args.save} --finetune")
        return 0
    if args.from_hf or args.from_mcore:
        source = args.from_hf or args.from_mcore
        with waiting("converting") as progress:
            if args.from_hf:
                made = import_hf(source, args.save, args.model_file, progress)
            else:
                with_optimizer = not args.no_load_optim
                made = import_mcore(
                    source, args.hf_config, args.save, warn, with_optimizer, progress
                )
        taken, how = Checkpoint(made), "--finetune"
        state = taken.state
        if args.from_mcore and state["iteration"]:
            moments = len(taken.weights()) < len(taken.index)
            how = (
                f"{'' if moments else '--no-load-optim '}--data-order megatron: iteration "
                f"{state['iteration']}, {state['consumed_samples']} samples consumed, AdamW's "
                + (f"state of {state['optimizer_steps']} updates" if moments else "moments at 0")
            )
        say(f"{source} -> {made}; continue from it with --load {args.save} {how}")
        return 0
    if args.to_mcore:
        with waiting("converting") as progress:
            read, made = export_mcore(args.load, args.to_mcore, warn, progress)
        state = open_checkpoint(read).state
        say(
            f"{read} -> {made}; continue in Megatron-LM with --load {args.to_mcore} --ckpt-format "
            f"torch_dist --use-distributed-optimizer: iteration {state.get('iteration', 0)}, "
            f"{state.get('consumed_samples', 0)} samples consumed"
        )
        return 0
    dtype = getattr(torch, args.dtype) if args.dtype else None
    shard = int((args.max_shard_size or 5.0) * 1e9)
    with waiting("converting") as progress:
        read = export_hf(
            args.load, args.to_hf, dtype, shard, args.tokenizer, args.model_file, progress=progress
        )
    say(f"{read} -> {args.to_hf}")
    return 0


def do_consolidate(args: argparse.Namespace) -> int:
    """Rewrite a checkpoint with whole tensors in few files."""
    with waiting("consolidating") as progress:
        size = int(args.max_file_size * 1e9)
        read, made = consolidate(args.place, args.save, size, progress)
    say(f"{read} -> {made}: {in_units(bytes_of(Checkpoint(made)))}")
    return 0


def do_prune(args: argparse.Namespace) -> int:
    """Remove old checkpoints as a run would."""
    root, keep, interval = run_directory(args.run), args.keep_last_k, args.save_retain_interval
    good: set[str] = set()
    if args.dry_run:
        removed = choose(root, keep, interval, good, warn)
    else:
        lock = DirectoryLock(root, warn, patience=0)
        try:
            clear_rubbish(root, good, warn)
            removed = prune(root, keep, interval, good, warn)
        finally:
            lock.close()
    for name in removed:
        say(f"{'would remove' if args.dry_run else 'removed'} {root / name}")
    remaining = [name for _, _, name in step_directories(root) if name not in removed]
    say(f"keeps {len(remaining)}: {', '.join(remaining)}")
    return 0


def positive(text: str) -> int:
    """Parse a count of at least 1."""
    return integer(1)(text)


def gigabytes(text: str) -> float:
    """Parse a positive size. Raises ValueError."""
    if not 0 < float(text) < 1e9:
        raise ValueError
    return float(text)


def parser() -> Parser:
    """Build the parser of all commands and their flags."""
    main = Parser(__doc__)
    commands = main.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: str, more: str = "") -> Parser:
        made = commands.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.\n\n{more}".rstrip(),
        )
        made.set_defaults(do=globals()[f"do_{name}"])
        if name != "prune":  # it removes what it reads
            made.add_trust_owner()
        return made

    place: Words = {"type": Path, "metavar": "PLACE", "help": "a run's directory or a step's"}
    run: Words = {"type": Path, "metavar": "RUN", "help": "a run's directory, its --save"}
    sub = command(
        "list",
        "list a run's checkpoints",
        "Compares sizes with each manifest, which is quick; `verify` reads every byte.",
    )
    sub.add_argument("run", **run)
    sub = command(
        "verify",
        "hash every file of every checkpoint, look for a NaN, and say which are damaged",
        "Exit code 1 if any is. A resume skips damaged checkpoints.",
    )
    sub.add_argument("place", **place)
    sub = command("show", "show a checkpoint's progress, layout, config and tensors")
    sub.add_argument("place", **place)
    sub.add_argument(
        "--tensors", action="store_true", help="each tensor: dtype, shape, which ranks wrote it"
    )
    sub = command(
        "diff",
        "compare two checkpoints, saved in any layouts",
        "Prints a line for each key of state and config that differs (A's value | B's), for each\n"
        "tensor that only one has, and for each tensor that differs: the number of elements, the\n"
        "largest difference, the first element. Both are hashed first. Exit code 1 if anything\n"
        "differs.",
    )
    sub.add_argument("a", **{**place, "metavar": "A"})
    sub.add_argument("b", **{**place, "metavar": "B"})
    sub.add_argument("--tensors", action="store_true", help="tensors only, not state and config")
    sub = command(
        "convert",
        "convert from and to Hugging Face's format and Megatron's, bit for bit",
        "Weights must be safetensors: .bin files are pickles, which can run code, and are not\n"
        "read. A run also takes a Hugging Face directory as it is: --load DIR. Conversion keeps\n"
        "the tokenizer's files. Of Megatron's formats torch_dist is read and written: weights,\n"
        "AdamW's state, and the run's progress. Nothing is unpickled, so --hf-config gives the\n"
        "model's sizes.",
    )
    way = sub.add_mutually_exclusive_group(required=True)
    way.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face directory to read")
    way.add_argument("--from-mcore", type=Path, metavar="DIR", help="Megatron's --save to read")
    way.add_argument(
        "--upcycle", type=Path, metavar="PLACE",
        help="dense model to read; its MLPs become the experts of a mixture",
    )  # fmt: skip
    way.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face directory to write")
    way.add_argument(
        "--to-mcore", type=Path, metavar="DIR", help="directory to write for Megatron's --load"
    )
    sub.add_argument(
        "--save", type=Path, metavar="RUN", help="with --from-*, --upcycle: where to write"
    )
    sub.add_argument("--num-experts", type=integer(2, 1 << 14), metavar="E", help="with --upcycle")
    sub.add_argument(
        "--moe-router-topk", type=positive, metavar="K",
        help="with --upcycle: experts of a token (default: 2)",
    )
    sub.add_argument(
        "--hf-config", type=Path, metavar="DIR",
        help="with --from-mcore: a directory with the model's config.json, and its tokenizer",
    )  # fmt: skip
    sub.add_argument(
        "--no-load-optim", action="store_true", default=None,
        help="with --from-mcore: the weights alone, not the optimizer's state",
    )  # fmt: skip
    sub.add_argument("--load", type=Path, metavar="PLACE", help="with --to-*: what to read")
    sub.add_argument("--model-file", metavar="PATH", help="a fork's model file (default: Weft's)")
    sub.add_argument("--dtype", choices=DTYPES, help="with --to-hf (default: as stored)")
    sub.add_argument(
        "--max-shard-size", type=gigabytes, metavar="GB", help="with --to-hf: per file (default: 5)"
    )
    sub.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="with --to-hf: take its tokenizer's files"
    )
    sub = command(
        "consolidate",
        "rewrite a checkpoint as one rank would save it: whole tensors, few files",
        "Weights and optimizer state keep their bits; any layout loads the result.",
    )
    sub.add_argument("place", **place)
    sub.add_argument("--save", type=Path, required=True, metavar="RUN", help="where to write")
    sub.add_argument(
        "--max-file-size", type=gigabytes, default=4.0, metavar="GB", help="per file (default: 4)"
    )
    sub = command(
        "prune",
        "remove old checkpoints as a run with these flags would",
        "The newest K complete ones stay (they are hashed first; a damaged one does not count),\n"
        "and every step that is a multiple of N. N alone also keeps the newest one, as in\n"
        "Megatron-LM. Refused while a run writes there.",
    )
    sub.add_argument("run", **run)
    sub.add_argument("--keep-last-k", type=positive, metavar="K")
    sub.add_argument("--save-retain-interval", type=positive, metavar="N")
    sub.add_argument(
        "--dry-run", action="store_true", help="print what would be removed; remove nothing"
    )
    return main


def spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together."""
    if args.do is do_convert:
        allowed_with: dict[str, tuple[str, ...]] = {"save": ("from_hf", "from_mcore", "upcycle")}
        allowed_with |= dict.fromkeys(("num_experts", "moe_router_topk"), ("upcycle",))
        allowed_with |= dict.fromkeys(("hf_config", "no_load_optim"), ("from_mcore",))
        allowed_with["model_file"] = ("from_hf", "to_hf")
        out = ("load", "dtype", "max_shard_size", "tokenizer")
        allowed_with |= dict.fromkeys(out, ("to_hf",)) | {"load": ("to_hf", "to_mcore")}
        ways_in = ("from_hf", "from_mcore", "upcycle", "to_hf", "to_mcore")
        (way,) = (name for name in ways_in if getattr(args, name))
        for name, ways in allowed_with.items():
            is_set = getattr(args, name) is not None
            flag, those = spelt(name), " or ".join(map(spelt, ways))
            if way in ways and not is_set and name in MUST:
                raise ValueError(f"{spelt(way)} needs {flag}")
            if way not in ways and is_set:
                raise ValueError(f"{flag} can only be used with {those}")
    if args.do is do_prune and args.keep_last_k is args.save_retain_interval is None:
        raise ValueError("prune needs --keep-last-k or --save-retain-interval")


def main(argv: Iterable[str] | None = None) -> int:
    """Run a command; return its exit code."""
    args = parser().parse_args(None if argv is None else list(argv))
    try:
        check(args)
        with owner_only():
            return args.do(args)
    except BrokenPipeError:  # the reader of the lines has closed the pipe: mpu/needs.py
        raise
    except (OSError, ValueError) as error:
        warn(sentence(error))
    return 2


if __name__ == "__main__":
    sys.exit(main())
