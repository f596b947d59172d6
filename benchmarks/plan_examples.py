# SPDX-License-Identifier: Apache-2.0
"""Print the layouts of the examples beside the planner's, with the reason for the difference.

    python benchmarks/plan_examples.py

The layout's flags are read from each example. The planner plans the same model, batch and sequence
length on the same GPUs. The seconds are predictions.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forecast.planner import search, table  # noqa: E402
from forecast.planner.cluster import read_cluster  # noqa: E402
from forecast.planner.model import read_model  # noqa: E402
from forecast.planner.played import Worker  # noqa: E402
from forecast.planner.recorded import Recorded, play  # noqa: E402
from tools.plan import TOP, plans_of  # noqa: E402
from training.run.text import aligned  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = (
    "--seq-length --tensor-model-parallel-size --sequence-parallel --tp-comm-overlap "
    "--pipeline-model-parallel-size --num-virtual-stages-per-pipeline-rank --pipeline-schedule "
    "--context-parallel-size --cp-comm-type --recompute-granularity --recompute-method "
    "--recompute-num-layers --micro-batch-size --global-batch-size --use-distributed-optimizer "
    "--zero-stage --overlap-grad-reduce --overlap-param-gather --zero-reduce-each-microbatch "
    "--cpu-offload-activations"
).split()


class Example(NamedTuple):
    """A script of examples/, its model, and its number of nodes of 8 H100."""

    script: str
    model: str
    nodes: int


EXAMPLES = (
    Example("llama3_8b_one_node.sh", "8B", 1),
    Example("llama3_70b_16_nodes.slurm", "70B", 16),
    Example("llama3_405b_64_nodes.slurm", "405B", 64),
)


def layout_flags(script: str) -> str:
    """Return the flags of a script that define its layout."""
    code = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    words = re.sub(r"\\\n", " ", "\n".join(code)).split()
    found = list[str]()
    for n, word in enumerate(words):
        if word in LAYOUT and word not in found:
            found.append(word)
            if n + 1 < len(words) and re.fullmatch(r"[a-z0-9_]+", words[n + 1]):
                found.append(words[n + 1])
    return " ".join(found)


def compared(example: Example, worker: Worker) -> tuple[list[str], str]:
    """Return an example's row of the table, and a sentence that compares it with the planner's."""
    cluster = read_cluster("h100_128_nodes").of(example.nodes)
    flags = layout_flags((ROOT / "examples" / example.script).read_text(encoding="utf-8"))
    batch = int(re.search(r"--global-batch-size (\d+)", flags)[1])  # type: ignore[index]
    length = int(re.search(r"--seq-length (\d+)", flags)[1])  # type: ignore[index]
    mine = Recorded(read_model(example.model, length), cluster, flags)
    plans = plans_of(example.model, cluster, {"global-batch-size": batch, "seq-length": length})
    best = search.recommended(play(plans.chosen(TOP), worker))
    play([mine], worker)
    slower = mine.played.step_seconds / best.played.step_seconds - 1
    a, b = table.breakdown(mine.played), table.breakdown(best.played)
    worst = max(table.TERMS, key=lambda key: a[key] - b[key])
    reason = (
        "no difference that the planner can tell" if slower <= search.COMPARISON_ERROR else
        f"the example takes {slower:.0%} longer than the planner's; most of it is "
        f"{table.TERMS[worst][0]}"
    )  # fmt: skip
    cells = [example.script]
    for run in (mine, best):
        cells += [table.described(run.config), f"{run.played.step_seconds:.1f}",
                  f"{run.bytes / 1e9:.0f}"]  # fmt: skip
    return [*cells, f"{slower:+.1%}"], f"{example.script}: {reason}"


def main() -> int:
    head = ["example", "its layout", "s", "GB", "the planner's", "s", "GB", "difference"]
    rows, reasons = [head], []
    with Worker() as worker:
        for example in EXAMPLES:
            cells, reason = compared(example, worker)
            rows.append(cells)
            reasons.append(reason)
    print("\n".join([*aligned(rows), *reasons]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
