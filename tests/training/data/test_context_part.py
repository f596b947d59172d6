# SPDX-License-Identifier: Apache-2.0
"""Each context-parallel rank keeps its part of a micro-batch, and together they keep all of it."""

import random

import numpy as np
import pytest
import torch

from training.data.batch import DocumentRules, make_batch
from training.data.context_part import context_part
from training.data.loader import Loader
from training.data.mock import MockDataset

EOD = 0


def drawn(rows: int, length: int, seed: int, **rules: bool):
    """Return a batch whose documents have any length."""
    tokens = np.random.default_rng(seed).integers(0, 7, (rows, length + 1))
    return make_batch(tokens, DocumentRules(EOD, **rules), first_sample=5)


@pytest.mark.parametrize("flags", [(), ("reset_position_ids", "reset_attention_mask"),
                                   ("reset_attention_mask", "eod_mask_loss")])  # fmt: skip
def test_every_token_is_on_one_rank_with_its_label_and_position(flags):
    draw = random.Random(len(flags))
    for seed in range(40):
        cp = draw.choice((2, 3, 4, 8))
        rows, length = draw.randint(1, 3), cp * draw.randint(1, 12)
        whole = drawn(rows, length, seed, **dict.fromkeys(flags, True))
        parts = [context_part(whole, rank, cp) for rank in range(cp)]
        assert {tuple(part.tokens.shape) for part in parts} == {(rows, length // cp)}
        assert sum(part.token_count for part in parts) == whole.token_count
        assert all(sum(part.packed_seq_params.lengths) == rows * length for part in parts)
        ids = whole.position_ids
        ids = torch.arange(length).expand(rows, length) if ids is None else ids
        mask = torch.ones(rows, length) if whole.loss_mask is None else whole.loss_mask
        for row in range(rows):
            want = zip(whole.tokens[row], whole.labels[row], ids[row], mask[row], strict=True)
            got = []
            for part in parts:
                own = torch.ones(length // cp) if part.loss_mask is None else part.loss_mask[row]
                columns = (part.tokens[row], part.labels[row], part.position_ids[row], own)
                got += zip(*(column.tolist() for column in columns), strict=True)
                if not flags:
                    places = part.position_ids[row].tolist()
                    assert places == sorted(places), "in ascending order"
            assert sorted(got) == sorted(tuple(x.item() for x in each) for each in want)


def test_documents_are_kept_and_one_rank_keeps_the_batch_as_it_is():
    whole = drawn(2, 12, 1, reset_attention_mask=True)
    assert context_part(whole, 0, 1) is whole
    assert context_part(whole, 1, 2).packed_seq_params is whole.packed_seq_params
    assert context_part(drawn(2, 12, 1), 1, 2).packed_seq_params.lengths == (12, 12)


def test_the_loaders_of_context_ranks_read_the_same_samples():
    data = MockDataset("train", 12, 3, 7, EOD)
    whole = Loader(data, 2, 1, 2, vocab_size=7, rules=DocumentRules(EOD))
    loaders = [
        Loader(data, 2, 1, 2, vocab_size=7, rules=DocumentRules(EOD), context=(rank, 3), workers=1)
        for rank in range(3)
    ]
    (batch,) = whole.next_global_batch(4, 4)
    for rank, loader in enumerate(loaders):
        (part,) = loader.next_global_batch(4, 4)
        assert part.first_sample == batch.first_sample
        assert torch.equal(part.tokens, context_part(batch, rank, 3).tokens)
        loader.close()
