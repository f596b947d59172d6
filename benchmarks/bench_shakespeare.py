#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train nanoGPT's published CPU recipe on a text, and our own recipe in the same CPU time.

    python benchmarks/bench_shakespeare.py shakespeare.txt --output runs/shakespeare

nanoGPT (github.com/karpathy/nanoGPT, README, "i only have a macbook") trains 4 layers of 128
channels and 4 heads on the characters of tiny Shakespeare, 64 characters per sample, 12 samples per
step, 2,000 steps, no dropout, and reports a validation loss of 1.88 nats per character after about
3 minutes. Here a Llama of that size trains on as many characters per step at the same learning
rate; then our own recipe trains for as many CPU seconds. Both train on nine tenths of the text, as
nanoGPT does, and are evaluated on all characters of the last tenth (nanoGPT's figure is of 20
random batches of it). CPU seconds are those of all threads of the run, start included, so that
other work on the machine has little effect. The text is data/tinyshakespeare/input.txt of
github.com/karpathy/char-rnn, 1,115,394 characters.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.data.indexed import IndexedWriter, token_dtype  # noqa: E402

PUBLISHED = 1.88  # nats a character
END = "<|endoftext|>"
SIZE = "--num-layers 4 --hidden-size 128 --num-attention-heads 4"
COMMON = """
    --device cpu --num-workers 0 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.99 --eval-interval 500 --full-validation --log-interval 10
    --tokenizer-type HuggingFaceTokenizer
"""
NANOGPT = f"""
    {SIZE} --ffn-hidden-size 320 --seq-length 64 --micro-batch-size 12 --global-batch-size 12
    --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 100 --train-iters 2000
"""
OWN = f"""
    {SIZE} --ffn-hidden-size 320 --seq-length 64 --micro-batch-size 12 --global-batch-size 12
    --optimizer muon --lr 2.5e-3 --min-lr 1e-4 --lr-warmup-iters 50
"""


def prepare(text: str, out: Path) -> dict[str, int]:
    """Write the tokens of both parts and a tokenizer of characters; return the characters of each.

    Raises ValueError for a text of fewer than 10,000 characters.
    """
    from tokenizers import Tokenizer, decoders, models

    if len(text) < 10_000:
        raise ValueError(f"the text has {len(text)} characters: 10,000 are needed")
    vocabulary = {character: i for i, character in enumerate(sorted(set(text)))}
    vocabulary[END] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([END])
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    made.save(str(out / "tokenizer" / "tokenizer.json"))
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    cut = int(0.9 * len(text))
    parts = {"train": text[:cut], "heldout": text[cut:]}
    for name, part in parts.items():
        with IndexedWriter(str(out / name), token_dtype(len(vocabulary))) as writer:
            writer.add([vocabulary[character] for character in part])
    return {name: len(part) for name, part in parts.items()}


def train(name: str, recipe: str, out: Path, threads: int) -> tuple[list[dict[str, float]], float]:
    """Run a recipe; return its evaluations and its CPU seconds."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = [*COMMON.split(), *recipe.split(), "--save", str(folder / "checkpoints")]
    words += ["--train-data-path", str(out / "train"), "--valid-data-path", str(out / "heldout")]
    words += ["--tokenizer-model", str(out / "tokenizer" / "tokenizer.json")]
    words += ["--log-json", str(folder / "log.jsonl"), "--keep-last-k", "1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(ROOT / "pretrain_llama.py"), *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [row for row in rows if "validation_loss" in row], seconds


def steps_of(recipe: str, out: Path, threads: int, seconds: float) -> int:
    """Return the number of steps of a recipe in `seconds` CPU seconds, from two short runs."""
    few, more = 60, 160
    times = [
        train("timing", f"{recipe} --train-iters {n} --eval-iters 0", out, threads)[1]
        for n in (few, more)
    ]
    each = (times[1] - times[0]) / (more - few)
    return max(100, int((seconds - times[0]) / each) + few)


def told(name: str, evaluations: list[dict[str, float]], seconds: float, steps: int) -> str:
    """Return a row of the table."""
    last = evaluations[-1]
    loss, bits = last["validation_loss"], last["validation_bits_per_byte"]
    return f"| {name} | {steps:,} | {seconds:.0f} s | {loss:.3f} | {bits:.3f} |"


def sample(folder: Path, prompt: str) -> str:
    """Return a prompt and its continuation by the run's model."""
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), "--load"]
    command += [str(folder / "checkpoints"), "--prompt", prompt, "--max-new-tokens", "56"]
    command += ["--temperature", "0.8", "--seed", "1"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run both recipes; print the table and the samples, draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="CPU, of our recipe (default: nanoGPT's)")
    parser.add_argument("--steps", type=int, default=2000, help="of nanoGPT's recipe")
    args = parser.parse_args()
    try:
        text = args.text.read_text(encoding="utf-8")
        sizes = prepare(text, args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"bench_shakespeare.py: {args.text}: {error}")
    print(f"{sizes['train']:,} characters to train on, {sizes['heldout']:,} held out", flush=True)
    print("| recipe | steps | CPU time | nats a character | bits a byte |")
    print("|---|---|---|---|---|")
    bits = PUBLISHED / math.log(2)
    print(f"| nanoGPT's README | 2,000 | 3 minutes | {PUBLISHED} | {bits:.3f} |", flush=True)
    recipe = f"{NANOGPT} --train-iters {args.steps}"
    evaluations, seconds = train("nanogpt", recipe, args.output, args.threads)
    print(told("the same, in our Llama", evaluations, seconds, args.steps), flush=True)
    steps = steps_of(OWN, args.output, args.threads, args.seconds or seconds)
    recipe = f"{OWN} --train-iters {steps}"
    evaluations, seconds = train("own", recipe, args.output, args.threads)
    print(told("our own", evaluations, seconds, steps), flush=True)
    logs = [str(args.output / name / "log.jsonl") for name in ("nanogpt", "own")]
    title = f"{args.text.stem}, characters: nanoGPT's recipe (ref) and our own"
    picture = [sys.executable, str(ROOT / "tools" / "plot_loss.py"), *logs, "--names", "ref", "own"]
    picture += ["--axis", "tokens", "--output", str(args.output / "loss.png"), "--title", title]
    picture += ["--reference", str(PUBLISHED), "published"]
    subprocess.run(picture, check=True)
    for name in ("nanogpt", "own"):
        prompt = "ROMEO:" if "ROMEO:" in text else text[:6]
        print(f"\n{name}:\n{sample(args.output / name, prompt)}")


if __name__ == "__main__":
    main()
