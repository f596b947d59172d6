# SPDX-License-Identifier: Apache-2.0
"""Count the launches and bytes of one layer between its matmuls by rehearsals: eager and fused.

    python benchmarks/fused_launches.py [--base COMMIT] [FLAG...]

Llama 3 8B is rehearsed with two layers and with one (docs/rehearsal.md). The difference is one
layer's forward and backward, without embedding and loss, divided by the two micro-batches of a
step. "eager" is without Triton. --base: also count another commit. FLAG: further flags of the
trainer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bisect.checkouts import checkout, describe  # noqa: E402

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --swiglu --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 2 --train-iters 20 --lr 1e-4 --clip-grad 1.0 --bf16
    --rehearse-device h100
""".split()
MICRO_BATCHES = 2
RUN = """
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
if not int(sys.argv.pop(1)):
    PathFinder.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MATMULS = ("aten::mm", "aten::addmm", "triton::grouped_wgrad_kernel")  # for weight gradients
APART = ("linear", "attention", "wgrad", "optimizer")  # parts that are not between the matmuls
Parts = Mapping[str, tuple[float, float]]  # launches and bytes of each part


def report(tree: Path, flags: Sequence[str], triton: bool, world: int = 1) -> dict[str, Any]:
    """Rehearse rank 0 of a tree's trainer; return the content of --rehearse-json."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rehearsal.json"
        words = [sys.executable, "-c", RUN, str(int(triton)), str(tree / "tools" / "rehearse.py")]
        words += [str(tree / "pretrain_llama.py"), *FLAGS, *flags, "--rehearse-json", out]
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"WORLD_SIZE": str(world)}
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
        made: dict[str, Any] = {}
        if done.returncode in (0, 1) and Path(out).exists():
            made = json.loads(Path(out).read_text())
        # without Triton, torch's operations replace its kernels on purpose: no finding
        kinds = {each["kind"] for each in made.get("findings", [])}
        if not triton:
            kinds.discard("stand-in")
        if not made or kinds:
            told = f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
            raise SystemExit(f"the rehearsal ended with {done.returncode}: {told}")
    return made


def rehearse(tree: Path, flags: Sequence[str], triton: bool) -> dict[str, Counter[str]]:
    """Rehearse a tree's trainer; return the launches and bytes of each part of a step."""
    parts: dict[str, Counter[str]] = {}
    for row in report(tree, flags, triton)["launches"]:
        part = parts.setdefault(row["part"], Counter())
        part.update(launches=row["count"], bytes=row["bytes"])
        if row["op"] in MATMULS and row["part"] == "wgrad":
            part.update(matmuls=row["count"], matmul_bytes=row["bytes"])
    return parts


def a_layer(tree: Path, flags: Sequence[str], triton: bool) -> Parts:
    """Return the launches and bytes of a layer per micro-batch, by part; the optimizer counts half.

    Launches of weight gradients other than matmuls are a part of their own, "wgrad accumulation".
    """
    two, one = (rehearse(tree, [*flags, f"--num-layers={n}"], triton) for n in (2, 1))
    found = {}
    for part in two:
        more = Counter(two[part])
        more.subtract(one.get(part, Counter()))
        launches, moved = more["launches"] - more["matmuls"], more["bytes"] - more["matmul_bytes"]
        if part == "wgrad":
            found["wgrad accumulation"] = launches / MICRO_BATCHES, moved / MICRO_BATCHES
            launches, moved = more["matmuls"], more["matmul_bytes"]
        found[part] = launches / MICRO_BATCHES, moved / MICRO_BATCHES
    return found


def table(columns: Mapping[str, Parts]) -> str:
    """Return a row for each part, those between the matmuls first, with their sum and the total."""
    parts = sorted({part for column in columns.values() for part in column})
    inner = [part for part in parts if part not in APART]
    rows = [("between the matmuls", inner), *((part, [part]) for part in inner)]
    rows += [(part, [part]) for part in APART] + [("all", parts)]
    lines = ["| part | " + " | ".join(f"{name}: launches | GB" for name in columns) + " |"]
    lines.append("|---" + "|---" * 2 * len(columns) + "|")
    for name, some in rows:
        sums = [[sum(c.get(p, (0, 0))[i] for p in some) for i in (0, 1)] for c in columns.values()]
        if any(launches for launches, _ in sums):
            cells = (f"{launches:.4g} | {moved / 1e9:.2f}" for launches, moved in sums)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="a commit, or a directory with a checkout, to count too")
    args, flags = parser.parse_known_args()
    columns: dict[str, Parts] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.base:
            columns[describe(args.base)] = a_layer(checkout(args.base, Path(folder)), flags, True)
        columns["eager"] = a_layer(ROOT, flags, False)
        columns["fused"] = a_layer(ROOT, flags, True)
    print(table(columns))


if __name__ == "__main__":
    main()
