# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes attention: the table of torch's conditions, and what is refused."""

import itertools

import pytest
import torch

from mpu.layers.attention.backends import (
    BACKENDS,
    Card,
    card_of,
    describe,
    kernel_of,
    prefers_cudnn,
)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
H100 = Card("cuda", 9, 0, 91900)
WORKS = ("rows", "blocks", "documents", "cache")


@pytest.mark.parametrize(
    "asked, card, dtype, size, kernels",
    [
        ("auto", H100, BF16, 128, "cudnn cudnn flash flash"),
        ("auto", H100._replace(cudnn=91500), BF16, 128, "flash flash flash flash"),  # 9.15.0
        ("auto", H100._replace(cudnn=91501), BF16, 128, "cudnn cudnn flash flash"),
        ("auto", H100._replace(cudnn=0), BF16, 128, "flash flash flash flash"),
        ("auto", H100._replace(deterministic=True), BF16, 128, "flash flash flash flash"),
        ("auto", Card("cuda", 8, 0, 91900), BF16, 128, "flash flash flash flash"),
        ("auto", Card("cuda", 10, 0, 91900), BF16, 64, "cudnn cudnn flash flash"),
        ("auto", Card("cuda", 10, 1, 91900, cuda=12), BF16, 64, "flash flash flash flash"),
        ("auto", Card("cuda", 12, 0, 91900), BF16, 128, "flash flash flash flash"),
        ("auto", H100, BF16, 256, "flash flash flash flash"),
        ("auto", H100._replace(cudnn=92300), BF16, 256, "cudnn cudnn flash flash"),
        ("auto", H100._replace(cudnn=92300), BF16, 192, "flash flash flash flash"),
        ("auto", H100, BF16, 264, "efficient math math efficient"),
        ("auto", H100, BF16, 100, "math math math math"),
        ("auto", H100, FP32, 128, "efficient math math efficient"),
        ("auto", H100, FP64, 128, "math math math math"),
        ("auto", Card("cuda", 8, 9), BF16, 200, "efficient math math efficient"),
        ("auto", Card("cuda", 7, 5), torch.float16, 128, "efficient math math efficient"),
        ("flash", H100, BF16, 128, "flash flash flash flash"),
        ("fused", H100, BF16, 128, "cudnn cudnn ! flash"),
        ("fused", Card("cuda", 8, 0, 90100), BF16, 128, "cudnn cudnn ! flash"),
        ("unfused", H100, BF16, 128, "math math math math"),
        ("local", H100, BF16, 128, "math math math math"),
        ("te", H100, BF16, 128, "te te te flash"),
        ("auto", Card(), FP32, 7, "cpu cpu cpu cpu"),
        ("fused", Card(), FP32, 7, "cpu cpu cpu cpu"),
        ("local", Card(), BF16, 7, "cpu cpu cpu cpu"),
        ("unfused", Card(), BF16, 7, "math math math math"),
    ],
)
def test_each_kind_of_work_has_its_kernel(asked, card, dtype, size, kernels):
    for work, kernel in zip(WORKS, kernels.split(), strict=True):
        if kernel == "!":
            with pytest.raises(ValueError, match=f"^--attention-backend {asked}: "):
                kernel_of(asked, card, dtype, size, work)
        else:
            assert kernel_of(asked, card, dtype, size, work) == kernel, work


@pytest.mark.parametrize(
    "asked, card, dtype, size, words",
    [
        ("flash", H100, FP32, 128, "computes bf16 and fp16, not fp32"),
        ("flash", H100, BF16, 100, "--kv-channels 100: .* at most 256 channels in multiples of 8"),
        ("flash", Card("cuda", 7, 5), BF16, 64, "8.0 to 12.1, not compute capability 7.5"),
        ("fused", H100, FP64, 128, "computes bf16 and fp16, not fp64"),
        ("fused", H100, BF16, 136, "--kv-channels 136: .* at most 128 channels"),
        ("fused", H100._replace(cudnn=0), BF16, 64, "must be 9.0 or newer, .*without cuDNN"),
        ("fused", H100._replace(deterministic=True), BF16, 64, "with --deterministic-mode use"),
        ("quick", H100, BF16, 64, "must be one of auto, flash, fused, unfused, local, te"),
    ],
)
def test_what_cannot_be_done_is_refused(asked, card, dtype, size, words):
    with pytest.raises(ValueError, match=rf"^--attention-backend {asked}: .*{words}"):
        kernel_of(asked, card, dtype, size)


def test_auto_refuses_nothing_and_keeps_cudnn_from_lengths_that_change():
    places = itertools.product(range(7, 13), range(2), (0, 91002, 92301))
    cards = [Card("cuda", *place) for place in places]
    kinds = (BF16, torch.float16, FP32, FP64)
    for card, dtype, size, work in itertools.product(cards, kinds, range(1, 300, 3), WORKS):
        kernel = kernel_of("auto", card, dtype, size, work)
        assert kernel in ("flash", "cudnn", "efficient", "math")
        assert kernel != "cudnn" or (work in ("rows", "blocks") and prefers_cudnn(card))


def test_the_device_is_asked_of_torch(monkeypatch):
    assert card_of("cpu") == Card() and card_of("meta").kind == "meta"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert card_of("cuda") == H100
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert card_of("cuda").flash == 3


def test_cudnn_comes_last_where_the_environment_says_so(monkeypatch):
    """torch's check_prefer_cudnn_attention reads it, and blocks would take cuDNN's operators."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for value, kernel in ((None, "cudnn"), ("0", "cudnn"), ("1", "flash")):
        if value is not None:
            monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", value)
        card = card_of("cuda")
        assert {kernel_of("auto", card, BF16, 128, work) for work in ("rows", "blocks")} == {kernel}
        assert kernel_of("fused", card, BF16, 128, "blocks") == "cudnn"


def test_the_line_names_each_kernel_once():
    assert describe("auto", H100._replace(flash=3), BF16, 128, ("rows", "documents")) == (
        "attention: cuDNN and FlashAttention 3 (--attention-backend auto on compute capability "
        "9.0, cuDNN 9.19.0)"
    )
    assert len({describe(asked, Card(), FP32, 8, WORKS[:3]) for asked in BACKENDS}) == len(BACKENDS)
