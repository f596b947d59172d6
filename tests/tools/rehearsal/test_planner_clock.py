# SPDX-License-Identifier: Apache-2.0
"""The planner's coarse list and the rehearsal's record: the same matmuls and attention, in time."""

import pytest

from benchmarks.plan_clocks import PARTS, parts, planned, seconds_of

MODEL = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --vocab-size 4096 --seq-length 1024 "
    "--untie-embeddings-and-output-weights --swiglu"
)
REST = (
    "--mock-data --tokenizer-type NullTokenizer --max-position-embeddings 1024 --lr 1e-3 "
    "--train-iters 8 --bf16 --micro-batch-size 1 --rehearse-device h100"
)


@pytest.mark.prove
def test_both_clocks_see_the_same_matmuls_and_attention(rehearse) -> None:
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 16"
    report = rehearse(f"{MODEL} {REST} {flags}", 8, small=False).report
    told = parts(seconds_of(report["time"]))
    said = parts(planned(8, flags, MODEL, 1024))
    assert set(told) == {"step", *PARTS} and abs(told["rest"]) < 0.02 * told["step"]
    assert said["attention"] == pytest.approx(told["attention"], rel=0.01)
    # beside a collective a matmul has fewer SMs, which the planner does not count
    assert 0.93 * told["matmul"] < said["matmul"] <= told["matmul"] * 1.001
    assert said["step"] == pytest.approx(told["step"], rel=0.3)


@pytest.mark.prove
def test_both_clocks_see_what_a_split_schedule_gathers_again(rehearse) -> None:
    flags = (
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--pipeline-schedule zb-h1 --global-batch-size 8"
    )
    report = rehearse(f"{MODEL} {REST} {flags}", 8, small=False).report
    told, said = parts(seconds_of(report["time"])), parts(planned(8, flags, MODEL, 1024))
    assert said["tp"] == pytest.approx(told["tp"], rel=0.2)


@pytest.mark.prove
def test_both_clocks_see_the_same_update_of_matrices(rehearse) -> None:
    """Muon's iterations, its passes, and what is sent to owners and back."""
    wide = MODEL.replace("--hidden-size 512 --ffn-hidden-size 1408", "--hidden-size 2048 "
                         "--ffn-hidden-size 5632")  # fmt: skip
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 8 --zero-stage 1 "
        "--overlap-grad-reduce --overlap-param-gather --optimizer muon"
    )
    report = rehearse(f"{wide} {REST} {flags}", 8, small=False).report
    told, said = parts(seconds_of(report["time"])), parts(planned(8, flags, wide, 1024))
    assert set(told) == {"step", *PARTS}
    assert said["update"] == pytest.approx(told["update"], rel=0.25)
