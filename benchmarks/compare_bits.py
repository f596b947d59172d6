# SPDX-License-Identifier: Apache-2.0
"""Compare losses, gradient norms, checkpoints and resumes with another commit's, bit for bit.

    python benchmarks/compare_bits.py BASE [--runs tp2-sp dp2-zero3 ...] [--keep FOLDER]

Each run of RUNS is trained three times on the CPU, only by command lines of pretrain_llama.py:

    base      STEPS + MORE steps in BASE, saved after STEPS and at the end
    new       the same in this checkout, its uncommitted changes included
    resumed   this checkout continues from the checkpoint that BASE saved after STEPS, to the end

`new` must log the same losses, gradient norms and learning rates as `base`, to the last bit, and
write the same files, byte for byte. `resumed` must do so for the steps after STEPS, which `base`
made without stopping. Every run starts in its own folder with the same relative paths, so that
paths in files do not differ. The table has a row for each run, followed by its first differences.
The exit code is 1 if anything differs or fails.

BASE is a commit, or a directory with a checkout. The run `forked` trains, in each tree, a copy of
its model/llama.py with another activation and one more norm (see FORK), as a user would fork it.

Ranks are forked from this process, which has imported torch (through benchmarks/differences.py) and
nothing from either tree, because importing torch takes longer than such a run.
"""

import argparse
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank's threads; read while torch is imported, below

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.differences import rows, rows_differ, saves_differ  # noqa: E402
from tools.bisect.checkouts import (  # noqa: E402
    ROOT,
    NoCheckout,
    build,
    checkout,
    describe,
    describe_here,
)

STEPS, MORE = 6, 2
LIMIT = 300.0  # seconds that one training may take
COMMON = f"""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --seq-length 32
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --vocab-size 101 --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer
    --mock-data --num-workers 0 --device cpu --micro-batch-size 1 --global-batch-size 4
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --clip-grad 0.5 --train-iters {STEPS + MORE} --log-interval 1 --log-json log.jsonl
    --save saved --load saved --save-interval {STEPS}
"""


@dataclass(frozen=True)
class Run:
    """A run made in both trees. forked: train the forked model. tied: tie head and embedding."""

    ranks: int
    flags: str
    forked: bool = False
    tied: bool = False

    def words(self) -> list[str]:
        """Return the program's flags."""
        untie = "" if self.tied else " --untie-embeddings-and-output-weights"
        return (COMMON + self.flags + untie).split()


TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
SP = TP + "--sequence-parallel "
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2 "
EARLY = "--overlap-grad-reduce --overlap-param-gather "
CP = "--context-parallel-size 2 --cp-comm-type "
WIDE = "--hidden-size 256 --ffn-hidden-size 256 --num-query-groups 4 --seq-length 128 "  # float8's
FLOAT8 = TP + WIDE + "--fp8-format "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall "
)
RUNS = {
    "tp2-sp": Run(2, SP),
    "tp2": Run(2, TP),
    "tp2-sp-ring": Run(2, SP + "--tp-comm-overlap ring"),
    "pp2-interleaved": Run(2, PP + VIRTUAL + "--pipeline-schedule interleaved"),
    "pp2-zb-v": Run(2, PP + "--pipeline-schedule zb-v"),
    "dp2-zero1": Run(2, EARLY + "--use-distributed-optimizer"),
    "dp2-zero3": Run(2, EARLY + "--zero-stage 3"),
    "dp2-zero2-bf16": Run(2, EARLY + "--zero-stage 2 --bf16"),
    "dp2-bf16-sums": Run(2, "--zero-stage 1 --grad-reduce-in-bf16"),
    "recompute": Run(4, SP + PP + "--recompute-granularity full"),
    "tied": Run(2, PP, tied=True),
    "forked": Run(2, SP, forked=True),
    "cp2-p2p": Run(2, CP + "p2p"),
    "cp2-a2a": Run(2, CP + "a2a"),
    "cp2-all-gather": Run(2, CP + "all_gather"),
    "float8-tensorwise": Run(2, FLOAT8 + "hybrid --fp8-recipe tensorwise"),
    "float8-rowwise": Run(2, FLOAT8 + "hybrid --fp8-recipe rowwise"),
    "float8-blockwise": Run(2, FLOAT8 + "e4m3 --fp8-recipe blockwise"),
    "float8-mxfp8": Run(2, FLOAT8 + "e4m3 --fp8-recipe mxfp8"),
    "offload-activations": Run(2, SP + "--cpu-offload-activations"),
    "offload-optimizer": Run(2, "--zero-stage 1 --optimizer-cpu-offload"),
    "packed-documents": Run(2, SP + "--reset-position-ids --reset-attention-mask --eod-mask-loss"),
    "pp2-v-half": Run(2, PP + "--pipeline-schedule v-half"),
    "experts": Run(2, EXPERTS + "--bf16"),
    "experts-overlap": Run(4, EXPERTS + PP + VIRTUAL + "--overlap-moe-expert-parallel-comm"),
    "zero3-tp2-pp2": Run(8, EARLY + SP + PP + "--zero-stage 3"),
}
FORK = {  # pattern: replacement in a copy of model/llama.py; each must match exactly once
    r"self\.down\(swiglu\(self\.gate_up\(x\)\)\)|swiglu\(x, self\.gate_up, self\.down\)":
    "self.down(gated(self.gate_up(x)))",
    r"\Z": (
        "\n\ndef gated(gate_up):\n"
        "    gate, up = gate_up.chunk(2, -1)\n"
        "    return gate.relu().square() * up\n"
    ),
    r"( +)self\.mlp_norm = (?:\w*RMSNorm|self\.norm_type)(\(.*\)\n)": (
        r"\g<0>" r"\1self.mlp_out_norm = RMSNorm\2"
    ),
    r"return h \+ self\.mlp\((self\.mlp_norm\(h\)|x)\)": (
        r"return h + self.mlp_out_norm(self.mlp(\1))"
    ),
    r'( +)"mlp_norm": \("post_attention_layernorm",\),\n': (
        r"\g<0>" r'\1"mlp_out_norm": ("post_feedforward_layernorm",),' "\n"
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, or a directory with a checkout")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS, metavar="RUN")
    parser.add_argument("--keep", type=Path, help="leave all runs' logs and checkpoints here")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        at = args.keep.resolve() if args.keep else Path(folder) / "runs"
        try:
            base = checkout(args.base, Path(folder) / "base")
            build(ROOT)
            found = compare_all(args.runs, base, Path(folder), at, args.base)
        except NoCheckout as error:
            sys.exit(f"compare_bits: {error}")
    wrong = [name for name, same in found.items() if not same]
    print(f"{len(found) - len(wrong)} of {len(found)} runs are the same, ", end="")
    print(f"{time.monotonic() - begin:.0f} s" + (f"; not: {' '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def compare_all(names: list[str], base: Path, forks: Path, at: Path, told: str) -> dict[str, bool]:
    """Make the runs in both trees and print the table; return whether each is the same."""
    print(f"base: {describe(told)}\nnew:  {describe_here()}")
    if any(RUNS[name].forked for name in names):
        fork(base, forks / "fork_of_base")
        fork(ROOT, forks / "fork_of_new")
    print(f"{'run':<20}{'ranks':<7}{'losses, norms':<15}{'checkpoints':<13}resumed from base's")
    same = {}
    for name in names:
        run = RUNS[name]
        script = {"base": base / "pretrain_llama.py", "new": ROOT / "pretrain_llama.py"}
        if run.forked:
            script = {side: forks / f"fork_of_{side}" / "pretrain_alpaca.py" for side in script}
        verdicts = compare_run(run, script["base"], script["new"], at / name)
        cells = ["different" if verdict else "same" for verdict in verdicts]
        print(f"{name:<20}{run.ranks:<7}{cells[0]:<15}{cells[1]:<13}{cells[2]}")
        for line in dict.fromkeys(filter(None, verdicts)):
            print(f"    {line}")
        sys.stdout.flush()
        same[name] = not any(verdicts)
    return same


def compare_run(run: Run, base: Path, new: Path, at: Path) -> tuple[str, str, str]:
    """Make one run three times in folders of `at`, with the scripts `base` and `new`.

    Return the first difference, or "", of losses and norms, of checkpoints, and of the resumed run.
    """
    shutil.rmtree(at, ignore_errors=True)
    first, last = (f"step_{step:08d}" for step in (STEPS, STEPS + MORE))
    if failed := train(base, at / "base", run):
        why = f"nothing to compare with, base failed: {failed}"
        return why, why, why
    if failed := train(new, at / "new", run):
        losses = checkpoints = f"failed: {failed}"
    else:
        want = rows(at / "base")
        assert len(want) == STEPS + MORE and None not in {row["loss"] for row in want}
        losses = rows_differ(want, rows(at / "new"))
        checkpoints = saves_differ(at / "base/saved", at / "new/saved", [first, last])
    shutil.copytree(at / "base/saved" / first, at / "resumed/saved" / first)
    if failed := train(new, at / "resumed", run):
        return losses, checkpoints, f"resumed: failed: {failed}"
    resumed = rows_differ(rows(at / "base")[STEPS:], rows(at / "resumed"))
    resumed = resumed or saves_differ(at / "base/saved", at / "resumed/saved", [first, last])
    return losses, checkpoints, resumed and f"resumed: {resumed}"


def fork(tree: Path, folder: Path) -> None:
    """Make a fork of a tree in `folder`, with links to the tree's files.

    alpaca.py is a changed copy of model/llama.py, pretrain_alpaca.py the program that trains it.
    Raises NoCheckout unless each text to replace occurs exactly once.
    """
    folder.mkdir()
    for path in tree.iterdir():
        if path.name not in (".git", ".venv"):
            (folder / path.name).symlink_to(path)
    text = (tree / "model" / "llama.py").read_text()
    for old, new in FORK.items():
        text, times = re.subn(old, new, text)
        if times != 1:
            raise NoCheckout(
                f"{tree}/model/llama.py: {old} of FORK matches {times} times, must match once"
            )
    (folder / "alpaca.py").write_text(text)
    program = (tree / "pretrain_llama.py").read_text()
    program, times = re.subn(r"\bfrom model\.llama import\b", "from alpaca import", program)
    if times != 1:
        raise NoCheckout(f"{tree}/pretrain_llama.py: imports model.llama {times} times, not once")
    (folder / "pretrain_alpaca.py").write_text(program)


def train(script: Path, folder: Path, run: Run) -> str:
    """Train a run in a folder, on all its ranks; return "", or a description of the failure."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin, left, codes = time.monotonic(), {}, {}
    try:
        for rank in range(run.ranks):
            pid = os.fork()
            if pid == 0:
                be_rank(script, folder, run, rank, port)
            left[pid] = rank
        while left and time.monotonic() - begin < LIMIT:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if left:
        return f"ranks {sorted(left.values())} did not end within {LIMIT:.0f} s"
    for rank, code in sorted(codes.items()):
        if code:
            said = (folder / f"err.{rank}").read_text().strip() or "nothing on stderr"
            return f"rank {rank} ended with exit code {code}: {said.splitlines()[-1]}"
    return ""


def be_rank(script: Path, folder: Path, run: Run, rank: int, port: int) -> None:
    """Run one rank in this forked process; never return."""
    try:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{kind}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        taken = {"mpu", "model", "training", "alpaca"} & sys.modules.keys()
        assert not taken, f"{taken} of one tree would be run in the other"
        os.chdir(folder)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(run.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.path[0] = str(script.parent)
        sys.argv = [str(script), *run.words()]
        runpy.run_path(str(script), run_name="__main__")  # ends the process, as the program does
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
