# SPDX-License-Identifier: Apache-2.0
"""Tell the memory that nanotron's runs of the Ultra-Scale Playbook reserve.

That table's memory is what the first pipeline rank has reserved after three steps. The tensors of
nanotron_step.py go through the allocator; two numbers are fitted, FITTED: what is left out.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tools.planner.known import GIB
from tools.planner.nanotron_step import Stage, Step
from tools.planner.runs import Array, Runs
from tools.planner.step_time import odds

FITTED = {
    "left_out": "reserved memory in units of what these tensors reserve",
    "work_gib": "GiB of context, libraries and buffers",
}
LOGIT = 10  # bytes: in bfloat16, in float32, and their exponents
OUTSIDE = 1.2 * GIB  # of a GPU: CUDA's context and NCCL's buffers
STEPS = 2  # the first one makes the optimizer's state, the second has the fragments


@lru_cache(maxsize=1 << 15)
def reserved(stage: Stage, gpu: float) -> tuple[float, bool]:
    """Return the GiB that a rank reserves at most, and whether a GPU of so many GiB has them."""
    step = Step(stage, gpu * GIB - OUTSIDE)
    step.set_up()
    for n in range(STEPS):
        step.batch()
        step.update(first=n == 0)
    return step.memory.most / GIB, not step.memory.full


def memory(
    c: Mapping[str, float], r: Runs, gpu: Array
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Return GiB of the first pipeline rank and of the fullest, and whether all ranks fit.

    gpu: GiB of a GPU. The host of a run that stalls is never ahead.
    """
    cut = r.by_rank(r.cut)
    ahead = odds(c, r) <= 0.5
    first, most, fits = np.zeros(len(r)), np.zeros(len(r)), np.ones(len(r), dtype=bool)
    for n in range(len(r)):
        place = int(r.head[n])
        for rank in (0, place):
            stage = Stage(
                layers=int(cut[n, rank]), hidden=int(r.hidden[n]), ffn=int(r.ffn[n]),
                vocab=int(r.vocab[n]), tokens=int(r.micro_batch[n] * r.sequence[n]),
                micro_batch=int(r.micro_batch[n]), micro_batches=int(r.micro_batches[n]),
                tp=int(r.tp[n]), dp=int(r.dp[n]), zero=int(r.zero[n]), first=rank == 0,
                last=rank == place, tied=bool(r.tied[n]), behind=int(r.pp[n]) - 1 - rank,
                ahead=bool(ahead[n]),
            )  # fmt: skip
            if rank and rough(stage) < most[n]:  # the end stage keeps less
                continue
            gib, enough = reserved(stage, float(gpu[n]))
            first[n] = first[n] if rank else gib
            most[n] = max(most[n], gib)
            fits[n] &= enough
    every = [c["left_out"] * gib + c["work_gib"] for gib in (first, most)]
    return every[0], every[1], fits


def rough(s: Stage) -> float:
    """Return about the GiB of a rank, without fragments."""
    h, f = s.hidden, s.ffn
    numbers = (s.layers * (4 * h * h + 3 * h * f) + (s.first + s.last) * s.vocab * h) / s.tp
    kept = numbers * (8 + 12 / (s.dp if s.zero else 1))
    flight = min(s.micro_batches, s.behind + 1)
    saved = 2 * s.tokens * (8 * h + 4 * f) / s.tp * s.layers * flight
    return (kept + saved + s.last * LOGIT * s.tokens * s.vocab / s.tp) / GIB
