# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory: the serial twin in fp64, and the bits of a run that keeps them."""

import itertools
import random

import pytest

from mpu.pipeline.schedules import CHUNKS
from tests.model.test_pipeline_parity import admitted, case_of, twin_of
from tests.model.twin import compare, run_layout
from tests.sampling import sampled
from training.settings.arguments import GpuConfig

ALL = GpuConfig(cpu_offload_activations=True, min_offloaded_tensor_size=1)
SOME = GpuConfig(
    cpu_offload_activations=True,
    offload_modules=("attention", "mlp", "mlp.down"),
    min_offloaded_tensor_size=1,
)
WAYS = [(ALL, None), (ALL, "selective"), (ALL, "full"), (SOME, None), (SOME, "selective")]


def cases(world: int) -> list[dict]:
    """List the schedules, ZeRO stages and recomputation that fill `world` ranks."""
    made = []
    schedules = [(name, pp) for name in CHUNKS for pp in (2, 4)] + [("1f1b", 1)]
    values = itertools.product(schedules, (1, 2), (1, 2), WAYS, range(4))
    for (schedule, pp), tp, dp, (gpu, recompute), zero in values:
        case = case_of(schedule, pp, 4, tp, dp, True, recompute=recompute, zero=zero, gpu=gpu)
        case["gather"] = zero == 3
        if pp * tp * dp == world and (dp > 1 or not zero) and admitted(case):
            made.append(case)
    return made


@pytest.mark.parametrize("size", sampled([2, 4], 2))
def test_a_sample_of_the_matrix(world, size):
    compare(world, twin_of, size, random.Random(size).sample(cases(size), 3))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4])
def test_more_of_the_matrix(world, size):
    compare(world, twin_of, size, random.Random(5).sample(cases(size), 20))


def both(comm, some):
    """Run each case as it is, and with its activations on the device; say whether bits agree."""
    found = []
    for case in some:
        kept = run_layout(comm, case | {"gpu": GpuConfig()}, steps=2)
        away = run_layout(comm, case, steps=2)
        pairs = zip(kept["grads"], away["grads"], strict=True)
        same = all(a[:3] == b[:3] and (a[3] == b[3]).all() for a, b in pairs)
        found.append(same and all(kept[k] == away[k] for k in ("losses", "norms")))
    return found


KEPT = [
    case_of("1f1b", 2, 3, 1, 2, False, gpu=ALL, dtype="bfloat16"),
    case_of("1f1b", 1, 2, 2, 2, True, gpu=ALL, zero=3, gather=True, recompute="selective"),
    case_of("zb-v", 2, 4, 2, 1, True, gpu=SOME, dtype="float32"),
]


@pytest.mark.prove
def test_bits_are_those_of_a_run_that_keeps_all(world):
    assert all(all(each) for each in world(4).run(both, KEPT))
