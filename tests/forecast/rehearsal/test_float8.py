# SPDX-License-Identifier: Apache-2.0
"""A step in float8 on a GPU: what scaled_mm is given, which of torch's own checks it passes."""

import pytest

pytest.importorskip("triton", reason="this platform has no triton")

SIZES = (
    "--hidden-size 256 --ffn-hidden-size 512 --kv-channels 128 --seq-length 128 "
    "--max-position-embeddings 128 --fp8-format hybrid --fp8-recipe"
)
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"


def parts(report, key="count"):
    return {row["part"]: row[key] for row in report["launches"]}


ZERO = "--zero-stage {} --overlap-grad-reduce --overlap-param-gather"
CASES = [
    ("tensorwise", 2, SPLIT),
    ("rowwise", 1, ""),
    ("delayed --rehearse-steps 3", 2, f"{SPLIT} --zero-stage 1"),
    ("rowwise --fp8-wgrad-bf16", 2, f"{SPLIT} --zero-stage 1"),
    ("blockwise", 2, SPLIT),
    ("mxfp8", 2, f"{SPLIT} --rehearse-device b200"),
    ("rowwise", 4, f"{SPLIT} {ZERO.format(3)}"),
    ("tensorwise", 2, f"{SPLIT} --tp-comm-overlap ring --recompute-granularity full"),
    ("blockwise", 4, f"{SPLIT} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    ("rowwise", 8, f"{SPLIT} --context-parallel-size 2 --cp-comm-type a2a {ZERO.format(1)}"),
    ("tensorwise", 1, "--rehearse-device l40s"),
    ("mxfp8 --first-last-layers-bf16", 4, f"{SPLIT} {ZERO.format(2)} --rehearse-device b200"),
]


@pytest.mark.prove
@pytest.mark.parametrize("recipe, world, flags", CASES)
def test_nothing_is_found_and_the_flops_are_those_of_bf16(rehearse, recipe, world, flags):
    found = rehearse(f"{flags} {SIZES} {recipe}", world)
    assert found.code == 0, found.text
    plain = rehearse(f"{flags} {SIZES} {recipe}".partition("--fp8-format")[0], world)
    flops, wanted = (sum(parts(each.report, "flops").values()) for each in (found, plain))
    assert flops == wanted > 0
    assert 0 < parts(found.report)["float8"] < 26 * 4 * 2  # of two layers, four projections each


@pytest.mark.parametrize(
    "recipe, device, why",
    [
        ("tensorwise", "a100", "8.9 or more"),
        ("blockwise", "b200", "on Blackwell use mxfp8"),
        ("mxfp8", "h100", "on Hopper use blockwise"),
    ],
)
def test_a_device_that_cannot_is_refused(rehearse, recipe, device, why):
    found = rehearse(f"{SIZES} {recipe} --rehearse-device {device}")
    assert found.code == 2 and why in found.text
