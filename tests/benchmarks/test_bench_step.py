# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_step.py: with --compile the peer is measured twice, each with its ratio."""

import sys

import pytest

from benchmarks import bench_step


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_peer_has_columns_of_its_own(monkeypatch, capsys, compiled):
    seconds = {"": [0.4, 0.5, 0.4], "--compile": [0.25, 0.25, 0.3]}
    asked = []

    def run_peer(peer, case, steps, more=""):
        asked.append(more)
        return seconds[more], 600.0

    monkeypatch.setattr(bench_step, "run_weft", lambda case, steps: ([0.2, 0.2, 0.3], 400.0))
    monkeypatch.setattr(bench_step, "run_peer", run_peer)
    monkeypatch.setattr(bench_step, "run_bound", lambda case: 0.1)
    words = ["bench_step.py", "--cases", "tiny-fp32-1", "--launches", "2"]
    monkeypatch.setattr(sys, "argv", [*words, *["--compile"] * compiled])
    bench_step.main()
    _, head, row = capsys.readouterr().out.splitlines()
    more = ["compiled", "ratio"] * compiled
    assert head.split()[: 4 + len(more)] == [
        "case", "Weft", "peer", "ratio", *more,
    ]  # fmt: skip
    more = ["4096", "1.25"] * compiled
    last = ["10240", "50%", "400", "600"]
    assert row.split() == ["tiny-fp32-1", "5120", "2560", "2.00", *more, *last]
    assert asked == ["", "--compile"][: 1 + compiled] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bound_has_the_products_of_a_layer_and_of_the_head(monkeypatch, dtype):
    monkeypatch.setitem(bench_step.SIZES, "least", (32, 2, 4, 2, 48, 64, 16))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    timed = []
    monkeypatch.setattr(bench_step, "fastest", lambda *kernels: timed.append(kernels) or 1.0)
    assert bench_step.bound_of_this_process("least", dtype, "2", "1") == 2 * 13.0 + 3.0
    for kernel in (kernel for kernels in timed for kernel in kernels):
        kernel()
