# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory on a GPU: the losses of a run without them.

`make gpu-check` runs it. Neither changes an operation, so the bits are equal; this has not run yet.
"""

import pytest

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
