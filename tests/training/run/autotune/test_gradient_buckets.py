# SPDX-License-Identifier: Apache-2.0
"""--ddp-bucket-size auto: all ranks take one size, told at the start, and no bit changes."""

import re

import pytest
import torch

from estimate.model_profile import make_grid
from mpu.launch import Launch
from pretrain_llama import model_provider
from tests.launcher import Launcher, Result
from tests.saved import check_equal, tensors
from tests.training.small_llama import read
from training.flags.parse import parse
from training.run.autotune import gradient_buckets

RUN = (
    "--mock-data --vocab-size 300 --num-layers 3 --hidden-size 96 --num-attention-heads 4 "
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 "
    "--device cpu --overlap-grad-reduce --log-interval 1 --save-interval 2 --save {dir}/saved"
)
CPU = torch.device("cpu")
TOLD = re.compile(r"gradient buckets: about ([\d,]+) elements, as measured: backward ")
ZERO1 = "--zero-stage 1 --overlap-param-gather --num-distributed-optimizer-instances 2"


def run(launcher: Launcher, ranks: int, more: str) -> Result:
    result = launcher.run(ranks, f"{RUN} {more}".split())
    assert result.codes == [0] * ranks, result.said(0)
    return result


@pytest.mark.parametrize(
    "ranks, more",
    [
        (2, ""),
        pytest.param(4, ZERO1, marks=pytest.mark.prove),
        pytest.param(
            4,
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4 "
            "--zero-stage 2 --overlap-param-gather --grad-reduce-in-bf16",
            marks=pytest.mark.prove,
        ),
        pytest.param(
            4, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", marks=pytest.mark.prove
        ),
    ],
)
def test_a_size_is_chosen_by_all_ranks_and_changes_no_bit(
    launcher: Launcher, ranks: int, more: str
) -> None:
    auto = run(launcher, ranks, f"{more} --no-shared-memory --ddp-bucket-size auto")
    (told,) = TOLD.findall(auto.said(0, "out"))
    assert f" of about {told} elements (" in auto.said(0, "out")
    usual = run(launcher, ranks, f"{more} --no-shared-memory")
    assert "gradient buckets" not in usual.said(0, "out")
    assert auto.losses() == usual.losses()
    check_equal(tensors(auto.folder / "saved", 2), tensors(usual.folder / "saved", 2))
    if ranks == 2:
        replayed(auto, int(told.replace(",", "")))


def replayed(run: Result, chosen: int) -> None:
    """What NCCL's bits depend on is in the checkpoint, for a run in this layout."""
    words = f"{RUN} --load {run.folder}/saved --ddp-bucket-size auto"
    words = words.replace("{dir}", str(run.folder))
    said = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "gather_bytes", lambda data, axis, device: [data])
        config = parse(words.split(), 2)
        grid = make_grid(config, Launch(0, 2))
        made = gradient_buckets.choose_size(
            config, grid, torch.device("cuda"), model_provider, said.append
        )
        assert made.parallel.ddp_bucket_size == chosen
        assert "as in the checkpoint, for the same bits" in said[0]
        other = parse(words.split(), 4)
        assert gradient_buckets.recorded(other, make_grid(other, Launch(0, 4)), CPU) == 0


@pytest.mark.parametrize(
    "more, world, why",
    [
        ("", 1, "there is one data-parallel rank"),
        ("--zero-stage 3", 2, "at --zero-stage 3 a bucket is a transformer block"),
    ],
)
def test_where_there_is_nothing_to_choose_a_line_says_why(more: str, world: int, why: str) -> None:
    config, lines = read(f"--ddp-bucket-size auto {more}", world), list[str]()
    assert config.parallel.ddp_bucket_size == 0

    grid = make_grid(config, Launch(0, world))
    made = gradient_buckets.choose_size(config, grid, CPU, model_provider, lines.append)
    assert made.parallel.ddp_bucket_size == 1 << 21 and lines[0].endswith(why)
    fixed = read("--ddp-bucket-size 5000", world)
    assert gradient_buckets.choose_size(fixed, grid, CPU, model_provider, lines.append) is fixed


def test_the_timeline_has_every_parameter_in_the_order_of_a_step() -> None:
    config = read("--ddp-bucket-size auto --untie-embeddings-and-output-weights")
    grid = make_grid(config, Launch())
    time = gradient_buckets.measured_timeline(config, grid, CPU, model_provider)
    names = list(time.ready)
    layers = [[n for n in names if n.startswith(f"layers.{i}.")] for i in range(3)]
    assert all(layers) and time.used.keys() == time.ready.keys()
    for early, late in zip(layers, layers[1:], strict=False):
        assert max(time.used[n] for n in early) < min(time.used[n] for n in late)
        assert min(time.ready[n] for n in early) > max(time.ready[n] for n in late)
    assert 0 < max(time.ready.values()) <= time.backward
    assert 0 <= min(time.used.values()) and max(time.used.values()) < time.forward
