# SPDX-License-Identifier: Apache-2.0
"""The product's layouts and examples have no finding, on a rank and between all ranks, and the dry
run's bytes for an example's rank are within 2% of what its rehearsal counts.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forecast.rehearsal.conftest import SMALL, stated
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[3]
TP, SP = "--tensor-model-parallel-size 2 ", "--tensor-model-parallel-size 2 --sequence-parallel "
CP = "--context-parallel-size "
PP, VP = "--pipeline-model-parallel-size ", "--num-virtual-stages-per-pipeline-rank 2 "
GRADS, GATHERS = "--overlap-grad-reduce ", "--overlap-param-gather "
ZERO = [f"--zero-stage {stage} " for stage in range(4)]
SCHEDULE = "--pipeline-schedule "
RECOMPUTE = "--recompute-granularity "
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
LAYOUTS = [  # world, flags; a global batch of 8
    (1, "--optimizer-cpu-offload --log-params-norm --param-group embedding.* frozen"),
    (1, RECOMPUTE + "selective"),
    (1, RECOMPUTE + "full --recompute-method block --recompute-num-layers 2"),
    (2, TP),
    (2, SP + RECOMPUTE + "full --tp-comm-overlap ring"),
    (2, SP + DOCUMENTS),
    (2, ZERO[0] + GRADS),
    (2, ZERO[2] + GRADS + GATHERS),
    (2, ZERO[3]),
    (2, ZERO[3] + GRADS + "--zero-reduce-each-microbatch"),
    (2, ZERO[2] + GRADS + "--zero-reduce-each-microbatch"),
    (2, ZERO[2] + "--zero-reduce-each-microbatch"),
    (2, ZERO[1] + "--optimizer-cpu-offload"),
    (2, ZERO[3] + GATHERS + RECOMPUTE + "full"),
    (2, PP + "2 " + SCHEDULE + "gpipe"),
    (2, PP + "2 " + SCHEDULE + "zb-v"),
    (2, PP + "2 " + SCHEDULE + "v-half"),
    (4, PP + "4"),
    (4, SP + ZERO[1] + GRADS + GATHERS),
    (4, SP + ZERO[3] + GRADS + GATHERS + "--tp-comm-overlap ring"),
    (4, PP + "2 " + SP + SCHEDULE + "zb-v " + "--tp-comm-overlap ring"),
    (4, PP + "2 " + ZERO[2] + GRADS + SCHEDULE + "zb-h1 "),
    (8, PP + "2 " + SP + ZERO[1] + GRADS + GATHERS + SCHEDULE + "interleaved " + VP),
    (8, PP + "2 " + SP + ZERO[3] + GATHERS + RECOMPUTE + "full"),
    (2, CP + "2 --cp-comm-type all_gather"),
    (2, CP + "2 --cp-comm-type p2p " + DOCUMENTS),
    (2, CP + "2 --cp-comm-type a2a " + ZERO[3] + GATHERS + RECOMPUTE + "full"),
    (4, CP + "2 " + SP + ZERO[1] + GRADS + "--cp-comm-type p2p"),
    (4, CP + "2 " + PP + "2 " + SCHEDULE + "zb-v --cp-comm-type p2p"),
    (8, PP + "2 " + SP + ZERO[1] + GRADS + GATHERS + "--rank-order pp-dp-tp-cp"),
    (4, CP + "2 " + ZERO[2] + GRADS + "--rank-order dp-cp-tp-pp"),
    (4, ZERO[1] + GRADS + "--num-distributed-optimizer-instances 2"),
    (2, ZERO[1] + GRADS + "--num-distributed-optimizer-instances 2 --main-grads-dtype bf16"),
]
WIDE = (
    "--hidden-size 256 --ffn-hidden-size 512 --kv-channels 128 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 512 --max-position-embeddings 512 --fp8-format "
)
LAYOUTS += [  # float8 by recipe
    (2, WIDE + "hybrid --fp8-recipe tensorwise " + SP),
    (4, WIDE + "hybrid --fp8-recipe delayed --fp8-amax-history-len 4 " + SP + ZERO[1] + GRADS),
    (2, WIDE + "hybrid --fp8-recipe rowwise " + SP + "--tp-comm-overlap ring"),
    (2, WIDE + "hybrid --fp8-recipe blockwise " + ZERO[3] + GRADS + GATHERS),
    (2, WIDE + "e4m3 --fp8-recipe mxfp8 --rehearse-device b200 " + SP),
    (2, WIDE + "e4m3 --fp8-recipe rowwise " + CP + "2 --cp-comm-type p2p"),
]
DEFERRED = "--defer-embedding-wgrad-compute --ddp-bucket-size 20000 " + GRADS + GATHERS
LAYOUTS += [
    (4, PP + "2 " + ZERO[1] + DEFERRED),
    (4, PP + "2 " + ZERO[2] + DEFERRED + VP),
    (4, PP + "2 " + ZERO[3] + DEFERRED),
]
QUICK = (18,)


@pytest.mark.prove
@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in QUICK], ids=str)
def test_a_rank_of_a_layout_has_no_finding(rehearse, layout):
    world, flags = layout
    more = f"--global-batch-size 8 --rehearse-rank {world - 1}"
    code, report, text = rehearse(f"{flags} {more}", world)
    assert report, text
    assert (report["findings"], code) == ([], 0)


def of_all_ranks(layout, file):
    """Rehearse all ranks in a process of its own: torch forks only before its first backward."""
    world, flags = layout
    words = [*SMALL, *flags.split(), "--global-batch-size", "8", "--rehearse"]
    words += ["--rehearse-all-ranks", "--rehearse-json", str(file)]
    done = subprocess.run(
        [sys.executable, ROOT / "pretrain_llama.py", *words], capture_output=True, text=True,
        check=False, env={**os.environ, "WORLD_SIZE": str(world)},
    )  # fmt: skip
    assert file.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    assert (json.loads(file.read_text())["findings"], done.returncode) == ([], 0)


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_of_a_layout_have_no_finding(layout, tmp_path):
    of_all_ranks(layout, tmp_path / "report.json")


@pytest.mark.prove
def test_a_long_rehearsal_says_how_far_it_is():
    often = "import sys; from tools import rehearse; from training.run import waiting as w; "
    often += "w.AFTER = w.MOST = 0.05; "
    words = ["--rehearse", "--global-batch-size", "8", "--rehearse-steps", "3"]
    done = subprocess.run(
        [sys.executable, "-c", often + "sys.exit(rehearse.main('pretrain_llama.py', sys.argv[1:]))",
         *SMALL, *words],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    for part in ("building the model", r"steps: 1 of 3, about \d+ s left", "looking for mistakes"):
        assert re.search(rf"^rehearsing: \d+ s, {part}$", done.stderr, re.M), part


@pytest.mark.prove
def test_a_large_world_is_not_matched(rehearse):
    code, _, text = rehearse("--global-batch-size 32 --rehearse-all-ranks", 32)
    assert code == 2 and "--rehearse-all-ranks: WORLD_SIZE is 32" in text


EXAMPLES = [  # file, world, a rank: the first, one in the middle, the last
    (name, world, rank)
    for name, world, ranks in [
        ("llama3_8b_one_node.sh", 8, (5,)),
        ("llama3_70b_16_nodes.slurm", 128, (0, 61, 127)),
        ("llama3_405b_64_nodes.slurm", 512, (0, 300, 511)),
    ]
    for rank in ranks
]


@pytest.mark.prove
@pytest.mark.parametrize("name, world, rank", EXAMPLES, ids=str)
def test_a_rank_of_an_example_has_no_finding_and_the_dry_runs_memory(name, world, rank, tmp_path):
    file, environment = tmp_path / "report.json", {**os.environ, "WORLD_SIZE": str(world)}

    def example(launch, *words):
        return subprocess.run(
            ["bash", f"examples/{name}", *words], cwd=ROOT, capture_output=True, text=True,
            check=False, env={**environment, "LAUNCH": launch},
        )  # fmt: skip

    asked = ["--rehearse", "--rehearse-rank", str(rank), "--rehearse-json", str(file)]
    done = example(sys.executable, *asked)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(file.read_text())
    assert report["findings"] == []
    argv = example(r"printf %s\n", "--dry-run").stdout.splitlines()[1:]
    told, counted = sum(stated(parse(argv, world), rank).values()), report["memory"]["peak_bytes"]
    assert abs(told - counted) <= 0.02 * counted, (told / 1e9, counted / 1e9)


@pytest.mark.prove
def test_a_rank_whose_process_is_killed_ends_the_rehearsal_of_all():
    """Rank 1 is killed while rank 0 waits for it."""
    program = """
import os, signal, sys
from forecast.rehearsal import guard
guard.load()
import pretrain_llama
from forecast.rehearsal import main
run = main.run
def killed(script, config, exchange=None, *more, **named):
    if config.rehearse.rehearse_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(script, config, exchange, *more, **named)
main.run = killed
sys.exit(main.main(pretrain_llama, sys.argv[1:]))
"""
    words = [*SMALL, "--global-batch-size", "8", "--rehearse", "--rehearse-all-ranks"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *TP.split()], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "WORLD_SIZE": "2"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the process of rank 1 ended without a result" in done.stdout + done.stderr
