# SPDX-License-Identifier: Apache-2.0
"""Print the layouts of the examples beside those that the planner chooses, with the reason.

    python benchmarks/plan_examples.py

The layout's flags are read from each example. The planner plans the same model, batch and sequence
on the same GPUs. A layout within the error of a comparison
(tools/planner/search.py: COMPARISON_ERROR) of the fastest is one of the first row's variants. The
rows are predictions: nothing was fitted on weft.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.plan import plans_of  # noqa: E402
from tools.planner import own, search, table  # noqa: E402
from tools.planner.cluster import read_cluster  # noqa: E402
from tools.planner.model import read_model  # noqa: E402
from training.text import aligned  # noqa: E402

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
    """A script of examples/, its model, and the nodes of 8 H100 that it runs on."""

    script: str
    model: str
    nodes: int


EXAMPLES = (
    Example("llama3_8b_one_node.sh", "8B", 1),
    Example("llama3_70b_16_nodes.slurm", "70B", 16),
    Example("llama3_405b_64_nodes.slurm", "405B", 64),
)


def layout_flags(script: str) -> str:
    """Return the flags of a script that make its layout."""
    code = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    words = re.sub(r"\\\n", " ", "\n".join(code)).split()
    found = list[str]()
    for n, word in enumerate(words):
        if word in LAYOUT and word not in found:
            found.append(word)
            if n + 1 < len(words) and re.fullmatch(r"[a-z0-9_]+", words[n + 1]):
                found.append(words[n + 1])
    return " ".join(found)


def compared(example: Example) -> tuple[list[str], str]:
    """Return an example's row of the table, and in a sentence how it stands to the planner's."""
    cluster = read_cluster("h100_128_nodes").of(example.nodes)
    flags = layout_flags((ROOT / "examples" / example.script).read_text(encoding="utf-8"))
    config = own.config_of(read_model(example.model, 8192), cluster, flags)
    model = read_model(example.model, config.model.seq_length)
    mine = search.evaluate(model, cluster, [own.layout_of(config)])
    batch = config.batch.global_batch_size
    plans = plans_of(example.model, cluster, {"global-batch-size": batch,
                                              "seq-length": config.model.seq_length})  # fmt: skip
    (row,) = plans.rows(1)
    slower = float(mine.times.step[0] / plans.times.step[row.fastest]) - 1
    near = slower <= search.COMPARISON_ERROR
    a, b = table.breakdown(mine, 0).seconds, table.breakdown(plans, row.first).seconds
    worst = max(table.TERMS, key=lambda key: a[key] - b[key])
    reason = (
        "one of the first row's variants: no difference that the planner can tell" if near else
        f"the example takes {slower:.0%} longer than the fastest; most of what it takes more than "
        f"the chosen one is {table.TERMS[worst]}"
    )  # fmt: skip
    cells = [
        example.script, named(mine, 0), f"{mine.times.step[0]:.1f}", f"{mine.exact(0) / 1e9:.0f}",
        named(plans, row.first), f"{plans.times.step[row.first]:.1f}",
        f"{plans.exact(row.first) / 1e9:.0f}", named(plans, row.fastest),
        f"{plans.times.step[row.fastest]:.1f}", f"{slower:+.1%}",
    ]  # fmt: skip
    return cells, f"{example.script}: {reason}"


def named(plans: search.Plans, n: int) -> str:
    """Return a layout in a few words."""
    e = plans.layouts[n]
    words = [f"tp {e.tp}"] * (e.tp > 1) + [f"cp {e.cp}"] * (e.cp > 1)
    if e.pp > 1:
        words.append(f"pp {e.pp} {e.schedule}" + f" v {e.virtual}" * (e.schedule == "interleaved"))
    words += [f"dp {e.dp}", f"b {e.micro_batch}", f"zero {e.zero}"]
    return ", ".join([*words, *table.activations_of(e)])


def main() -> int:
    head = ["example", "its layout", "s", "GB", "the planner's", "s", "GB", "fastest", "s",
            "example against fastest"]  # fmt: skip
    rows, reasons = [head], []
    for example in EXAMPLES:
        cells, reason = compared(example)
        rows.append(cells)
        reasons.append(reason)
    print("\n".join([*aligned(rows), *reasons]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
