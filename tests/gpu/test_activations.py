# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory, and CUDA graphs, on a GPU: the losses of a run without them.

`make gpu-check` runs it. Neither changes an operation, so the bits are equal; this has not run yet.
"""

import pytest

from tests.gpu import test_trainer
from tests.gpu.test_trainer import train

pytestmark = pytest.mark.gpu
SAME = "--deterministic-mode"
OFFLOAD = ["--cpu-offload-activations", "--min-offloaded-tensor-size", "1"]


@pytest.mark.parametrize(
    "more",
    [[], ["--offload-modules", "mlp"], ["--recompute-granularity", "full"]],
    ids=["all", "SwiGLU", "inputs"],
)
def test_offloaded_activations_have_the_bits_of_those_that_stay(tmp_path, more):
    recompute = more if "full" in more else []
    want, _ = train(tmp_path, "cuda", "bf16", 1, SAME, *recompute)
    losses, _ = train(tmp_path, "cuda", "bf16", 1, SAME, *OFFLOAD, *more)
    assert losses == want


def test_graphs_have_the_bits_of_eager_steps(tmp_path, monkeypatch):
    some = [word for word in test_trainer.FLAGS if word != "--reset-attention-mask"]
    monkeypatch.setattr(test_trainer, "FLAGS", some)
    untied = "--untie-embeddings-and-output-weights"
    want, _ = train(tmp_path, "cuda", "bf16", 1, SAME, untied)
    more = ["--cuda-graph", "--cuda-graph-warmup-steps", "1"]
    losses, _ = train(tmp_path, "cuda", "bf16", 1, SAME, untied, *more)
    assert losses == want
