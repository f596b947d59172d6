# SPDX-License-Identifier: Apache-2.0
"""The bytes of text behind a token are those of the tokens whose loss counts."""

from types import SimpleNamespace

import numpy as np

from training.data import bytes_per_token as module
from training.data.batch import DocumentRules
from training.data.bytes_per_token import bytes_per_token
from training.data.tokenizer import NullTokenizer

EOD = 9
TOKENIZER = SimpleNamespace(name="x", eod=EOD, decode=lambda ids: "".join("aé☃"[i] for i in ids))
ROW = np.array([0, 1, 2, EOD, 0, 2])  # the labels are é ☃ . a ☃, of 2, 3, 0, 1 and 3 bytes


def data(asked):
    return SimpleNamespace(seq_length=5, length=None, sample=lambda i: asked.append(i) or ROW)


def test_the_labels_are_counted_and_the_end_of_a_document_has_no_text():
    asked = []
    assert bytes_per_token(data(asked), TOKENIZER, DocumentRules(EOD), 3) == 9 / 5
    assert asked == [0, 1, 2]
    masked = DocumentRules(EOD, eod_mask_loss=True)  # the label after the end does not count
    assert bytes_per_token(data([]), TOKENIZER, masked, 1) == 8 / 4


def test_few_tokens_are_decoded_and_numbers_have_no_text(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "MOST", 12)
    bytes_per_token(data(asked), TOKENIZER, DocumentRules(EOD), 100)
    assert asked == [0, 1]
    assert bytes_per_token(data([]), NullTokenizer(10), DocumentRules(9), 1) is None
