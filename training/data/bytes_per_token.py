# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of text behind a token, so that losses compare over tokenizers."""

from typing import Any

import numpy as np

from training.data.batch import PAD, DocumentRules
from training.data.dataset import Dataset

MOST = 1 << 18  # tokens that are decoded


def bytes_per_token(
    dataset: Dataset, tokenizer: Any, rules: DocumentRules, samples: int
) -> float | None:
    """Return the bytes of text of a token whose loss counts, over the first so many samples.

    At most MOST tokens are decoded: the first ones, or, of a dataset that ends, samples that lie
    evenly in all of it. They are decoded one by one, so a tokenizer that drops the space at the
    begin of a text drops a byte a sample. The end of a document has no text. None where tokens
    stand for no text (NullTokenizer).
    """
    if tokenizer.name == "NullTokenizer":
        return None
    size = tokens = 0
    most = max(1, MOST // dataset.seq_length)
    chosen = range(max(1, min(samples, most)))
    if dataset.length is not None:
        chosen = range(0, dataset.length, -(-dataset.length // most))
    for i in chosen:
        row = dataset.sample(i)
        labels: np.ndarray = row[1:]
        if rules.eod_mask_loss:
            labels = labels[row[:-1] != rules.eod]
        labels = labels[labels != PAD]
        tokens += len(labels)
        text = tokenizer.decode(labels[labels != tokenizer.eod].tolist())
        size += len(text.encode("utf-8", "replace"))
    return size / tokens if size else None
