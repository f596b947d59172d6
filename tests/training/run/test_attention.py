# SPDX-License-Identifier: Apache-2.0
"""What --attention-backend and --flash-attention-version do when a run starts."""

import pytest
import torch

from mpu.layers.attention.backends import Card
from training.flags.parse import parse
from training.run import attention as module
from training.settings.config import UsageError

FLAGS = """--mock-data --vocab-size 1000 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --train-iters 10 --lr 1e-3 --micro-batch-size 1 --bf16 --dry-run"""
H100 = Card("cuda", 9, 0, 91900)
DEVICE = torch.device("cuda")


def started(monkeypatch, flags, card=H100, installed=(), broken=False):
    """Return the notes of a start on a card, and the implementations that torch was given."""
    active, notes = [], []

    def activate(name):
        if name not in installed or broken:
            raise RuntimeError(f"no {name}\nin two lines")
        active.append(name)

    monkeypatch.setattr(module, "card_of", lambda device: card._replace(flash=3 if active else 2))
    monkeypatch.setattr(module, "find_spec", lambda name: "FA3" in installed or None)
    monkeypatch.setattr(module.attention, "activate_flash_attention_impl", activate)
    module.prepare_attention(parse([*FLAGS.split(), *flags.split()], 1), DEVICE, notes.append)
    return notes, active


DOCS = "--reset-attention-mask"


@pytest.mark.parametrize(
    "flags, card, installed, active, words",
    [
        ("", H100, ("FA3",), [], "cuDNN (--attention-backend auto on compute capability 9.0"),
        (DOCS, H100, ("FA3",), ["FA3"], "FlashAttention 3 (--attention-backend auto"),
        ("--attention-backend flash --flash-attention-version 2", H100, ("FA3",), [], "tion 2 ("),
        (DOCS, Card("cuda", 8, 0, 91900), ("FA3",), [], "FlashAttention 2 ("),
        ("--attention-backend unfused", H100, (), [], "matrix products (--attention-backend unf"),
    ],
)
def test_a_run_says_which_attention_runs(monkeypatch, flags, card, installed, active, words):
    card = card._replace(deterministic="deterministic" in flags)
    notes, done = started(monkeypatch, flags, card, installed)
    assert done == active and len(notes) == 1 and words in notes[0], notes


@pytest.mark.parametrize("cudnn, flags, tokens", [
    (91002, "--seq-length 100", 100), (91500, "--seq-length 128", 0),
    (91900, "--seq-length 100", 0),
    (91002, "--seq-length 512 --context-parallel-size 4 --cp-comm-type p2p", 64),
    (91002, "--seq-length 512 --context-parallel-size 4 --cp-comm-type a2a", 0),
    (91002, "--seq-length 1024 --context-parallel-size 4 --cp-comm-type p2p", 0),
])  # fmt: skip
def test_an_old_cudnn_is_not_given_lengths_that_it_reads_beyond(monkeypatch, cudnn, flags, tokens):
    """torch takes cuDNN of itself from 9.15.1 on, for that reason; a flag asks before that."""
    monkeypatch.setattr(module, "card_of", lambda device: H100._replace(cudnn=cudnn))
    words = [*FLAGS.split(), "--attention-backend", "fused", *flags.split()]
    config = parse(words, 4 if "context" in flags else 1)
    notes = []
    if not tokens:
        module.prepare_attention(config, DEVICE, notes.append)
        assert "cuDNN" in notes[0]
        return
    with pytest.raises(UsageError, match=f"rows and blocks of {tokens} tokens, no multiple"):
        module.prepare_attention(config, DEVICE, notes.append)


def test_a_package_that_cannot_be_used_is_said_where_nobody_asked_and_refused_where_one_did(
    monkeypatch,
):
    notes, done = started(monkeypatch, DOCS, installed=("FA3",), broken=True)
    assert notes[0] == (
        "FlashAttention 3 is installed but cannot be used here (RuntimeError: no FA3)"
    )
    assert "FlashAttention 2 (" in notes[1] and not done
    words = r"--flash-attention-version 4 cannot be used \(RuntimeError: no FA4\)"
    with pytest.raises(UsageError, match=words):
        started(monkeypatch, f"{DOCS} --flash-attention-version 4")


def test_a_version_that_nothing_uses_is_said(monkeypatch):
    notes, _ = started(monkeypatch, "--flash-attention-version 3", installed=("FA3",))
    assert notes[0].startswith("--flash-attention-version 3 has no effect")


@pytest.mark.parametrize(
    "flags, card, words",
    [
        ("--attention-backend fused", H100._replace(cudnn=0), "must be 9.0 or newer"),
        ("--attention-backend flash", Card("cuda", 7, 5), "8.0 to 12.1, not compute capability 7"),
        ("--attention-backend fused", H100._replace(deterministic=True), "not deterministic"),
    ],
)
def test_what_the_card_cannot_do_is_refused_before_ranks_meet(monkeypatch, flags, card, words):
    with pytest.raises(UsageError, match=words):
        started(monkeypatch, flags, card)
