#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train one model with Weft and with megatron-core on a CPU; draw both losses and their difference.

    pip install psutil megatron-core==0.16.1
    python benchmarks/loss_curve.py shakespeare.txt

Both start from the weights that Weft draws, converted for megatron-core by `tools/checkpoint.py
convert --to-mcore`, and both read the same .bin and .idx in Megatron's order (`--data-order
megatron`; megatron-core's own GPTDataset). Weft runs on two tensor-parallel ranks with sequence
parallelism, megatron-core in one process with its own model, optimizer and schedule
(tests/tools/megatron_core_run.py). The sizes are those of nanoGPT's recipe for a CPU
(bench_shakespeare.py): 4 layers of 128, 12 samples of 64 characters per step, in fp32.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_shakespeare import prepare  # noqa: E402
from benchmarks.bench_step import command, environment  # noqa: E402
from tools.pictures.style import PALETTE, QUIET, axes_at, page  # noqa: E402

Losses = dict[int, float]  # by iteration, in nats per token
MEGATRON = ROOT / "tests" / "tools" / "megatron_core_run.py"
PICTURE = ROOT / "docs" / "loss_curve.svg"
SEQUENCE, LAYERS, HIDDEN, FFN, HEADS, GROUPS = 64, 4, 128, 320, 4, 2
MICRO, GLOBAL = 6, 12  # samples
LR, MIN_LR = 1e-3, 1e-4  # after a warm-up over a tenth of the steps
RANKS = 2


def train_weft(data: Path, vocabulary: int, steps: int, out: Path) -> Losses:
    """Train; return the losses. OUT/weft gets a checkpoint of the start, step_00000000."""
    shutil.rmtree(out / "weft", ignore_errors=True)
    log = out / "weft.jsonl"
    log.unlink(missing_ok=True)
    flags = f"""
        --tensor-model-parallel-size {RANKS} --sequence-parallel --device cpu --num-workers 0
        --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
        --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS}
        --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --norm-epsilon 1e-5
        --untie-embeddings-and-output-weights --micro-batch-size {MICRO}
        --global-batch-size {GLOBAL} --lr {LR} --min-lr {MIN_LR} --lr-decay-style cosine
        --lr-warmup-iters {steps // 10} --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
        --tokenizer-type NullTokenizer --vocab-size {vocabulary} --split 1,0,0
        --data-order megatron --train-iters {steps} --log-interval 1 --on-nan rewind
    """
    paths = ["--data-path", str(data), "--save", str(out / "weft"), "--log-json", str(log)]
    run([*command(RANKS), str(ROOT / "pretrain_llama.py"), *flags.split(), *paths], RANKS)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["iteration"]: row["loss"] for row in rows if "loss" in row}


def train_megatron(python: str, data: Path, vocabulary: int, steps: int, out: Path) -> Losses:
    """Train from the start saved by Weft; return the losses."""
    shutil.rmtree(out / "start", ignore_errors=True)
    convert = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), "convert", "--to-mcore"]
    run([*convert, str(out / "start"), "--load", str(out / "weft" / "step_00000000")], 1)
    flags = f"""
        --layers {LAYERS} --hidden {HIDDEN} --ffn {FFN} --heads {HEADS} --groups {GROUPS}
        --sequence {SEQUENCE} --vocabulary {vocabulary} --micro {MICRO} --global-batch {GLOBAL}
        --lr {LR} --min-lr {MIN_LR} --warmup {steps // 10} --decay {steps} --train-iters {steps}
        --more {steps}
    """
    paths = ["--data", str(data), "--load", str(out / "start")]
    run([python, str(MEGATRON), str(out / "megatron"), *paths, *flags.split()], 1)
    found = json.loads((out / "megatron" / "run.json").read_text())["losses"]
    return {int(iteration): loss for iteration, loss in found.items()}


def version_of_megatron(python: str) -> str | None:
    """Return the version of megatron-core in an interpreter, or None."""
    asks = "import megatron.core; print(megatron.core.__version__)"
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", asks], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def run(words: list[str], ranks: int) -> None:
    """Run a command without printing its output. Exits with that output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, env=environment(ranks))
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def differences(ours: Losses, theirs: Losses) -> Losses:
    """Return |ours - theirs| of each iteration. Raises ValueError if the iterations differ."""
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} losses, of different iterations")
    return {i: abs(ours[i] - theirs[i]) for i in ours}


def draw(ours: Losses, theirs: Losses, about: str, path: Path) -> None:
    """Draw both losses over the iterations, and below them the size of their difference."""
    apart = differences(ours, theirs)
    steps, worst = sorted(ours), max(apart.values())
    title = f"Loss beside megatron-core's: at most {worst:.1e} apart in {len(steps):,} steps"
    with page(path, 8.4, 4.5, title, about) as figure:
        above = axes_at(figure, 0.75, 0.85, 5.9, 1.75)
        below = axes_at(figure, 0.75, 2.85, 5.9, 1.1, sharex=above)
        both = {"megatron-core, one process": theirs, f"Weft, {RANKS} tensor-parallel ranks": ours}
        looks = [(PALETTE[1], 4, 0.45), (PALETTE[0], 0.9, 1)]
        for (name, losses), (color, width, alpha) in zip(both.items(), looks, strict=True):
            values = [losses[i] for i in steps]
            above.plot(steps, values, color=color, linewidth=width, alpha=alpha, label=name)
        above.set_ylabel("loss [nats a character]")
        above.legend(loc="upper right")
        above.tick_params(labelbottom=False)
        shown = [max(apart[i], 1e-9) for i in steps]  # equal losses have no logarithm
        below.plot(steps, shown, ".", color=PALETTE[0], markersize=2, markeredgewidth=0)
        below.set(yscale="log", xlabel="iteration", xlim=(0, steps[-1]))
        below.set_ylabel("difference")
        for axes in (above, below):
            axes.grid()
        last = steps[-1]
        for axes, y, text in (
            (above, ours[last], f"Weft {ours[last]:.6f}\nmegatron-core {theirs[last]:.6f}"),
            (below, worst, f"at most {worst:.1e}\nat step 1: {apart[steps[0]]:.1e}"),
        ):
            axes.annotate(
                text, (last, y), (8, 0), textcoords="offset points", va="center", color=QUIET
            )


def main() -> None:
    """Train both, print the differences of their losses, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path, help="a text of 10,000 characters or more")
    parser.add_argument("--megatron-python", default=sys.executable, metavar="PATH",
                        help="where megatron-core is in another environment")  # fmt: skip
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/loss-curve"))
    parser.add_argument("--output", type=Path, default=PICTURE, help="the picture: .svg or .png")
    args = parser.parse_args()
    version = version_of_megatron(args.megatron_python)
    if version is None:
        sys.exit(f"loss_curve.py: --megatron-python {args.megatron_python} cannot import "
                 "megatron.core: pip install psutil megatron-core==0.16.1")  # fmt: skip
    args.work_dir.mkdir(parents=True, exist_ok=True)
    try:
        text = args.text.read_text(encoding="utf-8")
        prepare(text, args.work_dir)
    except (OSError, ValueError) as error:
        sys.exit(f"loss_curve.py: {args.text}: {error}")
    data = args.work_dir / "train"
    vocabulary = len(set(text)) + 1  # and the end of a document
    vocabulary += vocabulary % RANKS  # so that RANKS, 2, divides it
    ours = train_weft(data, vocabulary, args.steps, args.work_dir)
    theirs = train_megatron(args.megatron_python, data, vocabulary, args.steps, args.work_dir)
    apart = differences(ours, theirs)
    last = max(ours)
    print(f"{args.text.name}, {vocabulary} characters, {last:,} steps, fp32; "
          f"megatron-core {version}")  # fmt: skip
    print(f"loss of step 1: Weft {ours[1]:.9f}, megatron-core {theirs[1]:.9f}, "
          f"{apart[1]:.1e} apart")  # fmt: skip
    print(f"loss of step {last}: Weft {ours[last]:.9f}, megatron-core {theirs[last]:.9f}, "
          f"{apart[last]:.1e} apart")  # fmt: skip
    print(f"largest difference of a step: {max(apart.values()):.1e}")
    about = (
        f"{args.text.stem}, a character a token; {LAYERS} layers of {HIDDEN}, fp32, on a CPU; "
        "the same weights and order of samples"
    )
    draw(ours, theirs, about, args.output)


if __name__ == "__main__":
    main()
