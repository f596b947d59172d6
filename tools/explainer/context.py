# SPDX-License-Identifier: Apache-2.0
"""The letters of docs/parallelism.md that count what context-parallel ranks send each other."""

from collections.abc import Sequence

from estimate.context_parallel import comm_type_of
from mpu.pipeline.layout import Stage
from training.config import Config
from training.schedule import recomputed_layers

LETTERS = {"p2p": "r", "all_gather": "g", "a2a": "h", "a2a+p2p": "m"}  # round, gather, heads, mixed


def context_letters(config: Config, stages: Sequence[Stage]) -> dict[str, int]:
    """Return the values on a pipeline rank that has these stages.

    Forwards of a layer's attention count twice where backward runs it again.
    """
    m, p = config.model, config.parallel
    cp, (near, far) = p.context_parallel_size, p.hierarchical_context_parallel_sizes or (1, 1)
    heads = m.num_attention_heads // p.tensor_model_parallel_size
    groups = max(1, m.num_query_groups // p.tensor_model_parallel_size)
    out = {
        "cp": cp,
        "near": near,
        "far": far,
        "kv": 2 * groups * m.kv_channels,
        "kvm": 2 * max(1, groups // near) * m.kv_channels,
        "qo": heads * m.kv_channels,
        "kvh": 2 * max(groups, cp) * m.kv_channels,
        "kvn": 2 * max(groups, near) * m.kv_channels,
    }
    for letter in LETTERS.values():
        out |= {f"{letter}F": 0, f"{letter}B": 0}
    for stage in stages:
        full = stage.layers[: recomputed_layers(config, stage)]
        for layer in stage.layers if cp > 1 else ():
            letter = LETTERS[comm_type_of(config, layer)]
            again = layer in full or p.recompute_granularity == "selective"
            out[f"{letter}F"] += 1 + again
            out[f"{letter}B"] += 1
    return out
