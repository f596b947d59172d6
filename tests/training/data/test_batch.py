# SPDX-License-Identifier: Apache-2.0
"""The effects of an end-of-document token, against loops that follow Megatron's description."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from training.data.batch import DocumentRules, make_batch

EOD = 0
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def slow(tokens):
    """Walk the tokens: positions, documents, mask."""
    position = document = 0
    found = []
    for token in tokens:
        found.append((position, document, float(token != EOD)))
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    return zip(*found, strict=True)


def test_rules_against_a_walk():
    rows = np.random.RandomState(0).randint(0, 4, size=(5, 34))
    rows[0] = EOD
    rows[1] = 1
    batch = make_batch(rows, DocumentRules(EOD, *[True] * 3), first_sample=11)
    assert torch.equal(batch.tokens, torch.from_numpy(rows[:, :-1]))
    assert torch.equal(batch.labels, torch.from_numpy(rows[:, 1:]))
    lengths: list[int] = []
    for i, row in enumerate(rows[:, :-1]):
        positions, documents, counts = map(list, slow(row))
        assert batch.position_ids[i].tolist() == positions
        lengths += [documents.count(i) for i in range(documents[-1] + 1)]
        assert batch.loss_mask[i].tolist() == counts
    assert batch.packed_seq_params.lengths == tuple(lengths)
    assert batch.packed_seq_params.cu_seqlens.tolist() == [0, *accumulate(lengths)]
    assert batch.token_count == batch.loss_mask.sum() < 5 * 33
    assert batch.first_sample == 11
    kinds = [t.dtype for t in (batch.tokens, batch.labels, batch.position_ids)]
    assert kinds == [torch.int64] * 3
    assert batch.loss_mask.dtype == torch.float32


@pytest.mark.parametrize("flag", FLAGS)
def test_a_rule_needs_an_eod(flag):
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} needs an end-of-document"):
        DocumentRules(None, **{flag: True})


def test_moves_to_a_device_whole():
    rows = np.array([[1, EOD, 2]])
    rules = DocumentRules(EOD, reset_position_ids=True, reset_attention_mask=True)
    moved = make_batch(rows, rules, 4).to("meta")
    assert moved.packed_seq_params.cu_seqlens.device.type == "meta"
    assert moved.tokens.device.type == moved.position_ids.device.type == "meta"
    assert moved.loss_mask is None and (moved.first_sample, moved.token_count) == (4, 2)
