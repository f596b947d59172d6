#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check muP's coordinates: do activations change by as much in wide models as in narrow ones?

    python benchmarks/coordinate_check.py
    python benchmarks/coordinate_check.py --widths 64 256 1024 --steps 4 --output coordinates.svg \\
        -- --model-file model/qwen3.py --hidden-size 64 --num-attention-heads 4 --lr 1e-2

For each width a model is trained for a few steps on one batch of random tokens, with and without
--use-mup. The root mean square of the change of its modules' outputs must not depend on the width;
otherwise a learning rate that is right at one width is wrong at another (Yang et al. 2022, Tensor
Programs V, appendix D.1). Printed is the slope of its logarithm over that of the width, for each
kind of module: 0 means no dependence. After "--" come flags of pretrain_llama.py for the base
model; the hidden size, the heads and the width of the MLP grow together. Exit code 1: with muP a
slope is beyond --tolerance; 2: a mistake in flags.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

import torch
from torch import Tensor, nn

import pretrain_llama
from model.load import of_checkpoint
from mpu.grid import Grid
from mpu.zero.bucket_layout import block_of
from tools.command_line import Parser, error_line
from tools.pictures.style import PALETTE, axes_at, check_name, page
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.flags.foreign import uses_of
from training.flags.parse import parse

# The embedding is large, so that a few steps hardly change the direction of the residual stream:
# otherwise the logits also change through the output layer's initial weights, as 1 / sqrt(width).
BASE = """--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 16
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1
    --train-iters 10 --lr 0.0025 --lr-decay-style constant --weight-decay 0 --clip-grad 0
    --mup-embedding-mult 50 --device cpu""".split()
MODES = ("standard", "muP")
Kinds = dict[str, float]  # a kind of module: the root mean square of its output's change


def with_flags(base: Sequence[str], more: Sequence[str]) -> dict[str, list[str]]:
    """Return flags with their values; a later one replaces an earlier one."""
    flags = {use.name: list(use.values) for use in uses_of([*base, *more])}
    if stray := flags.get(""):
        raise ValueError(f"{stray[0]}: the first word after -- must be a flag of pretrain_llama.py")
    return flags


def of_width(flags: dict[str, list[str]], width: int, mup: bool) -> list[str]:
    """Return the command line of a model of a width, with other sizes in proportion to the base."""
    base = int(flags["--hidden-size"][0])
    made = {k: v for k, v in flags.items() if not k.startswith(("--use-mup", "--mup-"))}
    heads = int(flags["--num-attention-heads"][0])
    head = int(flags.get("--kv-channels", [str(base // heads)])[0])
    sizes = ["--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--num-query-groups"]
    for name in (*sizes, "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        if name not in flags:
            continue
        size = int(flags[name][0]) * width
        if size % base:
            raise ValueError(f"--widths {width}: {name} {flags[name][0]} of the base {base} times "
                             f"{width / base:g} is not a whole number")  # fmt: skip
        made[name] = [str(size // base)]
    made["--kv-channels"] = [str(head)]
    if mup:
        made |= {k: v for k, v in flags.items() if k.startswith("--mup-")}
        made |= {"--use-mup": [], "--mup-base-hidden-size": [str(base)]}
        made.setdefault("--mup-base-head-dim", [str(head)])
    return [word for name, values in made.items() for word in (name, *values)]


def start(words: Sequence[str]) -> pretrain_llama.LlamaRun:
    """Build a model and its optimizer on one rank."""
    config = parse(list(words), 1, None, of_checkpoint)
    return pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())


def batch_of(run: pretrain_llama.LlamaRun, seed: int) -> Batch:
    """Return a batch of random tokens: the same for every width."""
    sizes, batch = run.config.model, run.config.batch
    drawn = torch.Generator().manual_seed(seed)
    shape = (batch.micro_batch_size, sizes.seq_length + 1)
    rows = torch.randint(0, sizes.vocab_size or 0, shape, generator=drawn)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(
        tokens, labels, loss_mask=None, position_ids=None, packed_seq_params=None,
        first_sample=0, token_count=tokens.numel(),
    )  # fmt: skip


@contextmanager
def seen(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the outputs of the embedding, of the blocks, and of direct submodules of blocks."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, each in module.named_modules():
        block = block_of(f"{name}.weight")
        inside = name[len(block) :].strip(".") if block else name
        if not name or inside.count(".") or isinstance(each, nn.ModuleDict | nn.ModuleList):
            continue

        def note(module: nn.Module, given: Any, out: Any, kind: str = inside or "block") -> None:
            if isinstance(out, Tensor) and out.is_floating_point():
                found.setdefault(kind, []).append(out.detach().double().clone())

        hooks.append(each.register_forward_hook(note))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def activations(run: pretrain_llama.LlamaRun, batch: Batch) -> dict[str, list[Tensor]]:
    """Return the outputs of each kind of module, by layer, and the logits."""
    with seen(run.module) as found:
        logits = run.model(batch.tokens)
    found.pop("head", None)
    return found | {"logits": [logits.double()]}


def change(words: Sequence[str], steps: int) -> Kinds:
    """Train a model for a few steps; return the change of each kind of module's output."""
    run = start(words)
    batch = batch_of(run, run.config.run.seed)
    before = activations(run, batch)
    for _ in range(steps):
        pretrain_llama.train_step(run, [batch], run.config.optimizer.lr)
        run.iteration += 1
    after = activations(run, batch)
    return {
        kind: math.sqrt(sum(float((a - b).square().mean()) for a, b in pairs) / len(pairs))
        for kind, outs in after.items()
        if (pairs := list(zip(outs, before[kind], strict=True)))
    }


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of log(value) over log(width), by least squares."""
    x, y = [math.log(w) for w in widths], [math.log(v) for v in values]
    mean = sum(x) / len(x)
    over = sum((a - mean) ** 2 for a in x)
    return sum((a - mean) * b for a, b in zip(x, y, strict=True)) / over


def slopes(widths: Sequence[int], found: dict[int, Kinds]) -> dict[str, float]:
    """Return the slope of each kind of module that changed."""
    kinds = [k for k in found[widths[0]] if all(found[w].get(k, 0.0) > 0 for w in widths)]
    return {kind: slope(widths, [found[w][kind] for w in widths]) for kind in kinds}


def check(flags: dict[str, list[str]], args: Any) -> dict[str, dict[int, Kinds]]:
    """Return the changes by mode and width: geometric means over the seeds."""
    found: dict[str, dict[int, Kinds]] = {}
    for mode in MODES:
        for width in args.widths:
            each = []
            for seed in range(1, args.seeds + 1):
                own = flags | {"--seed": [str(seed)]}
                each.append(change(of_width(own, width, mode == "muP"), args.steps))
            mean = {
                kind: math.exp(sum(math.log(max(k[kind], 1e-300)) for k in each) / len(each))
                for kind in each[0]
            }
            found.setdefault(mode, {})[width] = mean
            print(f"{mode:8} width {width:5}  " + row(mean), flush=True)
    return found


def row(kinds: Kinds) -> str:
    """Return the numbers and their names as one line."""
    return "  ".join(f"{kind} {value:.3g}" for kind, value in kinds.items())


def draw(
    output: Path, widths: Sequence[int], steps: int, found: dict[str, dict[int, Kinds]]
) -> None:
    """Draw the changes over the widths, a panel for each mode."""
    title = "How much activations change while a model learns"
    below = f"RMS of the change after {steps} steps; a name is followed by the slope over the width"
    with page(output, 7.6, 4.0, title, below) as figure:
        panels: list[Any] = []
        for i, mode in enumerate(MODES):
            axes = axes_at(figure, 0.7 + 3.5 * i, 1.0, 2.1, 2.4, sharey=(panels or [None])[0])
            panels.append(axes)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=10)
            axes.set_title(mode, loc="left", fontsize=9)
            axes.set_xlabel("hidden size")
            axes.set_xticks(list(widths), [str(w) for w in widths])
            of = slopes(widths, found[mode])
            for colour, kind in zip(PALETTE, of, strict=False):
                points = [found[mode][w][kind] for w in widths]
                label = f"{kind} {of[kind]:+.2f}"
                axes.plot(widths, points, color=colour, marker="o", markersize=3, label=label)
            axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = Parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=4, help="training steps of each model")
    parser.add_argument("--seeds", type=int, default=4, help="models of each width")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest slope with muP")
    parser.add_argument("--output", type=Path, help="a picture: .svg or .png")
    args = parser.parse_args(words[:at])
    args.widths = sorted(set(args.widths))
    if len(args.widths) < 2 or args.steps < 1 or args.seeds < 1:
        raise ValueError("give at least two --widths, and --steps and --seeds of at least 1")
    if args.output:
        check_name(args.output)
    flags = with_flags(BASE, words[at + 1 :])
    found = check(flags, args)
    worst = {}
    for mode in MODES:
        own = slopes(args.widths, found[mode])
        worst[mode] = max(own.values(), key=abs)
        print(f"{mode:8} slopes       " + "  ".join(f"{k} {v:+.3f}" for k, v in own.items()))
    if args.output:
        draw(args.output, args.widths, args.steps, found)
    good = abs(worst["muP"]) <= args.tolerance
    print(f"largest slope: {worst['muP']:+.3f} with muP (at most {args.tolerance}), "
          f"{worst['standard']:+.3f} without")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(error_line("coordinate_check.py", error), file=sys.stderr)
        sys.exit(2)
