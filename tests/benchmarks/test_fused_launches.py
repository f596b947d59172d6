# SPDX-License-Identifier: Apache-2.0
"""What a layer launches between its matmuls: the goals, held by the rehearsal."""

from collections import Counter

import pytest

from benchmarks import fused_launches
from benchmarks.fused_launches import APART, ROOT, a_layer, table


def test_a_layer_is_what_the_second_one_adds(monkeypatch):
    def rehearse(tree, flags, triton):
        layers = int(flags[-1].rpartition("=")[2])
        wgrad = Counter(launches=3 * layers, bytes=300 * layers)
        wgrad.update(matmuls=2 * layers, matmul_bytes=200 * layers)
        return {"loss": Counter(launches=9, bytes=9), "wgrad": wgrad}

    monkeypatch.setattr(fused_launches, "rehearse", rehearse)
    found = a_layer(ROOT, [], True)
    assert found == {"loss": (0, 0), "wgrad": (1, 100), "wgrad accumulation": (0.5, 50)}
    said = table({"before": found}).splitlines()
    assert said[2] == "| between the matmuls | 0.5 | 0.00 |"
    assert said[-1].startswith("| all | 1.5 |")


@pytest.mark.prove
def test_a_fused_layer_of_llama_3_8b_keeps_the_goals():
    eager, fused = (a_layer(ROOT, [], triton) for triton in (False, True))
    between = [part for part in fused if part not in APART]
    assert sum(launches for launches, _ in fused.values()) <= 30
    assert sum(fused[part][1] for part in between) <= 4.5e9
    moved = [sum(moved for _, moved in column.values()) for column in (eager, fused)]
    assert moved[1] <= 0.7 * moved[0]
