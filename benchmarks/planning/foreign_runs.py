# SPDX-License-Identifier: Apache-2.0
"""Published runs of other programs, and the times of their steps by the planner's estimate.

The estimate is forecast/planner/step_time.py. What only these programs have is added to its
constants: as an array over the runs where it depends on a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from forecast.planner import step_time
from forecast.planner.constants import LINKS
from forecast.planner.runs import Array, Runs
from forecast.planner.step_time import Constants, Times

SOCKET = 4  # GPUs of one socket
PLAIN = {"core_again": 0, "comm": 0, "overlap": 0, "offload": 0, "reduces": 1,
         "experts": 0, "topk": 0, "expert_ffn": 0, "ep": 1,
         "dispatcher": 0, "paired": 0, "channels": 0}  # the defaults  # fmt: skip


@dataclass(frozen=True)
class ForeignRuns(Runs):
    """Runs of other programs."""

    causal: Array  # 1: attention skips masked blocks
    idle: Array  # 1: a pipeline rank has no work

    @property
    def tokens(self) -> Array:
        """Return the number of tokens of a step."""
        return self.dp * self.micro_batch * self.micro_batches * self.sequence

    @property
    def flops(self) -> Array:
        """Return the model's FLOPs per token: 6 per weight in matmuls, plus attention's.

        Only the top-k experts of a token count.
        """
        score = np.where(self.causal > 0, 6.0, 12.0)
        active = self.layer_weights + self.topk * self.expert_weights
        matmuls = 6 * (self.layers * active + self.vocab * self.hidden)
        return matmuls + score * self.layers * self.sequence * self.queries


def even_cut(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage; the first ones have one more if they do not divide."""
    return [layers // stages + (n < layers % stages) for n in range(stages)]


def stacked(records: Sequence[dict[str, Any]]) -> ForeignRuns:
    """Return the runs of records: dicts with their fields, or PLAIN's defaults; cut is a list."""
    longest = max(len(record["cut"]) for record in records)
    cut = np.zeros((len(records), longest))
    for row, record in zip(cut, records, strict=True):
        row[: len(record["cut"])] = record["cut"]
    names = [field.name for field in fields(ForeignRuns) if field.name != "cut"]
    values = {
        name: np.array([r.get(name, PLAIN.get(name)) for r in records], float) for name in names
    }
    return ForeignRuns(**values, cut=cut)


def constants_of(c: Constants, r: ForeignRuns) -> dict[str, Any]:
    """Return the constants of the planner's estimate for runs. c: those of frameworks.py."""
    beside = c["host_beside"] + c["host_crossing"] * (r.tp > r.node)
    shares_host = (r.pp > 1) & (r.nodes > 1)
    return {
        **c,
        **{f"{level}.ring.Simple": c[f"{level}_step"] for level in LINKS},
        "attention": c["attention"] * np.where(r.causal > 0, 1.0, 0.5),
        "host_layer_tp": c["host_layer_tp"] + np.where(r.tp > SOCKET, c["host_socket"], 0.0)
        + np.where(shares_host, r.tp * beside, 0.0),
        "update_bytes": c["update_bytes"]
        + c["update_unsharded"] * np.where(r.zero > 0, r.dp * r.cp, 1),
    }  # fmt: skip


def times(c: Constants, r: ForeignRuns) -> Times:
    """Return the times of steps of these runs. c: the constants of frameworks.py."""
    summed = (c["fsdp"] > 0) & (r.zero >= 3) & (r.pp == 1)  # by layer
    r = replace(r, reduces=np.where(summed, 0.0, r.reduces))
    return step_time.times(constants_of(c, r), r)
