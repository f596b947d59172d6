# SPDX-License-Identifier: Apache-2.0
"""Compare the planner with published runs of mixtures of experts: half fitted, half predicted.

    python -m benchmarks.planning.experts

All runs are Megatron-LM's, so the profile is nemo_h100, whose other constants were fitted on dense
models. `dispatch`, the factor between the seconds of ep's transfers and those at the links' rates,
is fitted on the rows marked "fit", with forced balance; `expert_skew` on a row with real routing
relative to the same run with forced balance. The other rows use these two. If a source does not
state its layout, one is assumed and marked so. Runs with HybridEP, DeepEP or the overlap of two
micro-batches use other mechanisms than ours and are not fitted.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.planning.foreign_runs import even_cut, stacked, times
from benchmarks.planning.frameworks import profile
from forecast.planner.model import MIXTURES
from forecast.planner.pipeline import SCHEDULES

NODE, NETWORK = 8, 50e9
PROFILE = "nemo_h100"
TRIED = {"dispatch": np.geomspace(0.5, 20, 60), "expert_skew": np.linspace(1.0, 3.0, 81)}


@dataclass(frozen=True)
class Published:
    """A published run. tflops: model TFLOP/s per GPU. part: "fit", "skew" or "test"."""

    model: str
    gpus: int
    tflops: float
    part: str
    layout: dict[str, Any]
    source: str
    batch: int = 256
    sequence: int = 4096
    real: bool = False  # real routing; else balance is forced


QWEN3, LARGE = "QWEN3-30B-A3B", "QWEN3-235B-A22B"
MEGATRON_BRIDGE = "Megatron-Bridge, moe-optimization.md"
ZOO = "Megatron-LM's ModelZoo, qwen3/readme.md"
ROWS = [
    Published(QWEN3, 16, 132.9, "fit", dict(ep=16), f"{MEGATRON_BRIDGE}: alltoall", 1024),
    Published(LARGE, 256, 200.0, "fit", dict(ep=8, pp=32), f"{ZOO}: alltoall", 2048),
    Published("MIXTRAL-8X22B", 128, 465.0, "fit", dict(tp=2, ep=8, pp=8),
              "ModelZoo, run_mixtral_8x22B.sh, forced; layout assumed"),
    Published("MIXTRAL-8X22B", 128, 445.0, "skew", dict(tp=2, ep=8, pp=8),
              "the same, real routing", real=True),
    Published("MIXTRAL-8X7B", 64, 468.0, "test", dict(ep=8, pp=4),
              "Megatron-LM's README, MCore 0.9; layout of its script, GPUs assumed"),
    Published("MIXTRAL-8X7B", 16, 230.0, "test", dict(tp=2, ep=8), "Megatron-LM#756, a user",
              real=True),
    Published(LARGE, 256, 167.0, "test", dict(tp=4, ep=8, pp=8), f"{ZOO}: alltoall", 2048),
    Published(QWEN3, 32, 120.0, "test", dict(ep=8), "ModelZoo#21, a user", real=True),
]  # fmt: skip


def record_of(row: Published) -> dict[str, Any]:
    """Return a row as fields of Runs, with micro-batches of one sequence and ZeRO 1."""
    sizes, (experts, topk, width), channels, _ = MIXTURES[row.model]
    layers, hidden, _, heads, groups, vocab = sizes
    tp, pp, ep = (row.layout.get(axis, 1) for axis in ("tp", "pp", "ep"))
    dp = row.gpus // (tp * pp)
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": groups,
        "ffn": experts / 3, "vocab": vocab, "sequence": row.sequence, "gated": 1, "tied": 0,
        "causal": 1, "tp": tp, "cp": 1, "dp": dp, "pp": pp, "virtual": 1, "micro_batch": 1,
        "micro_batches": row.batch // dp, "zero": 1, "recompute": 0, "sequence_parallel": tp > 1,
        "float8": 0, "schedule": SCHEDULES.index("1f1b"), "node": NODE, "network": NETWORK,
        "head": pp - 1, "idle": 0, "experts": experts, "topk": topk, "expert_ffn": width,
        "ep": ep, "channels": channels, "cut": even_cut(layers, pp),
    }  # fmt: skip


def told(rows: list[Published], constants: dict[str, float]) -> list[float]:
    """Return the predicted model TFLOP/s per GPU of rows; rows with forced balance have no skew."""
    found = []
    for row in rows:
        runs = stacked([record_of(row)])
        c = constants if row.real else constants | {"expert_skew": 1.0}
        seconds = times(c, runs).step
        found.append(float((runs.tokens * runs.flops / seconds / runs.gpus)[0] / 1e12))
    return found


def fitted(rows: list[Published]) -> dict[str, float]:
    """Return the profile's constants with both fitted, by least squares of the logarithms."""
    c = dict(profile(PROFILE))
    for name, part in (("dispatch", "fit"), ("expert_skew", "skew")):
        some = [row for row in rows if row.part == part]
        beside = [row for row in rows if row.part == "fit" and part == "skew"]
        # for a row with real routing, the ratio to the forced one of its model
        pairs = [(row, next((b for b in beside if b.model == row.model), None)) for row in some]

        def error(value: float, name: str = name, pairs: Any = pairs) -> float:
            total = 0.0
            for row, forced in pairs:
                far = np.log(told([row], c | {name: value})[0] / row.tflops)
                if forced is not None:
                    far -= np.log(told([forced], c | {name: value})[0] / forced.tflops)
                total += far**2
            return float(total)

        c[name] = float(min(TRIED[name], key=error))
    return c


def main() -> None:
    """Print the table."""
    c = fitted(ROWS)
    print(f"profile {PROFILE}: dispatch {c['dispatch']:.2f}, expert_skew {c['expert_skew']:.2f}")
    print(f"{'part':5} {'model':16} {'GPUs':>4} {'published':>9} {'told':>6} {'off':>6}  source")
    far: dict[str, list[float]] = {"fit": [], "skew": [], "test": []}
    for row, value in zip(ROWS, told(ROWS, c), strict=True):
        far[row.part].append(abs(value / row.tflops - 1))
        off = f"{value / row.tflops - 1:+.0%}"
        line = f"{row.part:5} {row.model:16} {row.gpus:4} {row.tflops:9.1f} {value:6.1f} {off:>6}"
        print(f"{line}  {row.source}")
    medians = ", ".join(f"{part} {np.median(values):.0%}" for part, values in far.items())
    print(f"median error: {medians}")
    without = told([replace(row, real=False) for row in ROWS], c | {"dispatch": 0.0})
    print(f"without ep's transfers: {', '.join(f'{v:.0f}' for v in without)}")


if __name__ == "__main__":
    main()
