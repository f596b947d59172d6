# SPDX-License-Identifier: Apache-2.0
"""Draw sets of flags at random, valid and not, and play them: a dry run and a short run agree.

    python tests/flag_sets.py 1000            dry runs alone
    python tests/flag_sets.py 200 --run       each set is also run, 2 steps on 1, 2 or 4 ranks
    python tests/flag_sets.py 1 --first 17    seed 17 alone

A line is printed for each set whose dry run ends in a traceback, whose run ends in a traceback or
hangs, or where one of the two refuses what the other one takes.
"""

import argparse
import contextlib
import io
import os
import random
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

import pretrain_llama
from tests.launcher import Launcher
from training.flags.flag_table import LIVE_KIND
from training.flags.megatron import known_flags
from training.settings.setting import Choice, Number

# drawn with the layout and the sizes; naming files; ending or lengthening a run of 2 steps
LEFT_OUT = """--mock-data --vocab-size --num-layers --hidden-size --ffn-hidden-size --seq-length
--num-attention-heads --num-query-groups --group-query-attention --kv-channels --lr --train-iters
--train-samples --device --micro-batch-size --global-batch-size --tensor-model-parallel-size
--pipeline-model-parallel-size --context-parallel-size --sequence-parallel --dry-run --rehearse
--rehearse-device --rehearse-steps --rehearse-rank --rehearse-json --help --model-file --model-size
--max-position-embeddings --distributed-timeout-minutes --exit-duration-in-mins --eval-iters
--eval-interval --wandb-project --pretrained-checkpoint --use-checkpoint-args --data-timeout
--local-copy-dir --manual-gc-interval""".split()
SMALL = (0, 1, 2, 3, 4, 8)


def layout(rng: random.Random) -> tuple[int, list[str]]:
    """Draw the ranks, the layout and the sizes; one in some does not divide."""
    world = rng.choice((1, 2, 4))
    tp, cp, pp = (rng.choice((1, 1, 2, 2, 4, 3) if world > 1 else (1, 1, 1, 2)) for _ in range(3))
    while tp * cp * pp > world and rng.random() < 0.9:
        tp, cp, pp = rng.choice(((1, cp, pp), (tp, 1, pp), (tp, cp, 1)))
    heads = rng.choice((2, 4, 4, 8, 3))
    words = f"""--mock-data --vocab-size {rng.choice((64, 100, 257))} --device cpu --lr 1e-3
        --num-layers {rng.choice((2, 4, 4, 3))} --hidden-size {heads * rng.choice((4, 8, 8, 16))}
        --ffn-hidden-size {rng.choice((32, 48, 64, 50))} --num-attention-heads {heads}
        --seq-length {rng.choice((8, 16, 32, 32, 20))} --train-iters 2
        --micro-batch-size {rng.choice((1, 1, 2))} --global-batch-size {rng.choice((4, 8, 8, 6))}
        --tensor-model-parallel-size {tp} --context-parallel-size {cp}
        --pipeline-model-parallel-size {pp}""".split()
    if rng.random() < 0.4:
        groups = rng.choice((1, 2, heads))
        words += ["--group-query-attention", "--num-query-groups", str(groups)]
    return world, words + (["--sequence-parallel"] if tp > 1 and rng.random() < 0.6 else [])


def value(rng: random.Random, rule: Choice | Number) -> str:
    """Draw what a flag of a choice or of a number is given: mostly within its rule, and small."""
    if isinstance(rule, Choice):
        return rng.choice(rule.choices) if rng.random() < 0.97 else "other"
    if rule.integer:
        most = rule.high if rule.high is not None else 8
        fit = [n for n in SMALL if rule.low <= n <= most] or [int(rule.low)]
        return str(rng.choice(fit) if rng.random() < 0.95 else rng.choice((-1, 10**19, 1.5)))
    top = rule.high if rule.high is not None else 2.0
    return f"{rng.uniform(rule.low, top):.3g}" if rng.random() < 0.95 else "nan"


def flag_set(seed: int) -> tuple[int, list[str]]:
    """Draw a set: the ranks, and the flags."""
    rng = random.Random(seed)
    world, words = layout(rng)
    table = [flag for flag in known_flags().values() if flag.kind == LIVE_KIND]
    usable = [
        flag
        for flag in table
        if flag.name not in LEFT_OUT
        and (flag.rule.nargs == 0 or isinstance(flag.rule, (Choice, Number)))
    ]
    for flag in rng.sample(usable, rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        words.append(flag.name)
        rule = flag.rule
        if isinstance(rule, (Choice, Number)) and not (rule.nargs == "?" and rng.random() < 0.3):
            words += [
                value(rng, rule) for _ in range(rng.choice((1, 2)) if rule.nargs == "*" else 1)
            ]
    if rng.random() < 0.2:
        words += ["--save", "{dir}/saves", "--save-interval", str(rng.choice((1, 2)))]
    return world, words


def dry(world: int, words: list[str]) -> tuple[int, str]:
    """Return the exit code of a dry run and what it said; -1 with the traceback where it broke."""
    out, before = io.StringIO(), dict(os.environ)
    os.environ["WORLD_SIZE"] = str(world)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = pretrain_llama.main([*words, "--dry-run"])
        return code, out.getvalue()
    except SystemExit as end:  # argparse
        return int(end.code or 0) if isinstance(end.code, int) else 2, out.getvalue()
    except BaseException:
        return -1, traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)


def play(seeds: Iterator[int] | range, launcher: Launcher | None, folder: Path) -> list[str]:
    """Play sets; return a line for each that is not as it should be. launcher: also run them."""
    wrong, counts = [], Counter[str]()
    for seed in seeds:
        world, words = flag_set(seed)
        here = [word.replace("{dir}", str(folder)) for word in words]
        code, said = dry(world, here)
        counts[f"dry run {code}"] += 1
        told = f"seed {seed}: WORLD_SIZE={world} {' '.join(words)}"
        if code not in (0, 2) or "Traceback" in said:
            wrong.append(f"{told}\n    dry run {code}: {said.strip().splitlines()[-1][:300]}")
            continue
        if launcher is None:
            continue
        result = launcher.start(world, [*words, "--distributed-timeout-minutes", "1"])
        result = launcher.wait(in_time=False)
        codes = sorted(set(result.codes), key=str)
        counts[f"run {codes}"] += 1
        texts = [result.said(rank) for rank in range(world)]
        if result.late or codes != [code] or any("Traceback" in text for text in texts):
            last = next((t.strip().splitlines()[-1] for t in texts if t.strip()), "")
            first = said.strip().splitlines()[0][:300] if code and said.strip() else ""
            wrong.append(f"{told}\n    dry run {code} {first}\n    run {codes}: {last[:400]}")
    print(dict(counts), flush=True)
    return wrong


def free_port() -> int:
    """Return a free TCP port on the loopback device."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> int:
    """Play as many sets as asked for; return 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description="play random sets of flags")
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--run", action="store_true", help="run them, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder), free_port) if args.run else None
        try:
            wrong = play(range(args.first, args.first + args.count), launcher, Path(folder))
        finally:
            if launcher:
                launcher.close()
    print("\n".join(wrong) or "none is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
