# SPDX-License-Identifier: Apache-2.0
"""Name lines of the product and parts of a step, from a traceback or an action's words."""

import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

from mpu.module_tracker import path_of

STATE = "mpu/optim/state_offload.py"
PARTS = {  # file -> part of a step; see FUNCTIONS for mpu/layers/fused*
    "mpu/activation_offload.py": "offload",
    "mpu/layers/rope.py": "rope",
    "mpu/layers/cross_entropy.py": "loss",
    "mpu/layers/linear_cross_entropy.py": "loss",
    "mpu/layers/softmax_rows.py": "loss",
    "mpu/layers/attention/core.py": "attention",
    "mpu/layers/attention/blocks.py": "attention",
    "mpu/layers/attention/block_attention.py": "attention",
    "mpu/layers/context_attention.py": "attention",
    "mpu/layers/attention/kv_exchange.py": "attention",
    "mpu/layers/attention/shards.py": "attention",
    "mpu/layers/packed_seq_params.py": "attention",
    "mpu/layers/embedding.py": "embedding",
    "mpu/layers/linear.py": "linear",
    "mpu/layers/experts.py": "experts",
    "mpu/layers/dispatch.py": "dispatch",
    "model/moe.py": "router",
    "mpu/layers/float8/cuda.py": "linear",
    "mpu/layers/float8/recipe.py": "float8",
    "mpu/layers/float8/rows.py": "float8",
}
FUNCTIONS = {"norm": "norm", "rope": "rope", "rotate": "rope", "swiglu": "swiglu"}


def lines_of(error: BaseException, fork: str) -> tuple[str, ...]:
    """Return the product's lines in the tracebacks of an exception and its causes, innermost first.

    Places named in their messages follow.
    """
    return tuple(dict.fromkeys(chain.from_iterable(traced(error, fork))))


def traced(error: BaseException, fork: str) -> tuple[list[str], list[str]]:
    """Return the lines of the tracebacks, and the places named in the messages, as two lists."""
    lines: list[str] = []
    words = ""
    cause: BaseException | None = error
    while cause is not None:
        here, trace = [], cause.__traceback__
        while trace is not None:
            if path := path_of(trace.tb_frame.f_code.co_filename, fork):
                here.append(f"{path}:{trace.tb_lineno}")
            trace = trace.tb_next
        lines = [*here[::-1], *lines]
        words += " ".join(["", str(cause), *getattr(cause, "__notes__", ())])
        cause = cause.__cause__ or cause.__context__
    named = re.findall(r"(?:mpu|model|training)/[\w/]+\.py:\d+|pretrain_llama\.py:\d+", words)
    return lines, named


@cache
def phase_of(action: str) -> str:
    """Return the phase of an action, from its words."""
    for begin, phase in (
        ("F ", "forward"),
        ("B ", "backward"),
        ("BW ", "backward"),
        ("W ", "wgrad"),
        ("the output layer's deferred", "wgrad"),
        ("the gradient sums", "grad sum"),
        ("the update", "update"),
    ):
        if action.startswith(begin):
            return phase
    return "start" if not action else "step"


def end_of(function: Callable[..., Any]) -> str:
    """Return file:line of a function's last line."""
    code = function.__code__
    line = max(line for _, _, line in code.co_lines() if line)
    return f"{path_of(code.co_filename, '') or code.co_filename}:{line}"
