# SPDX-License-Identifier: Apache-2.0
"""Divide the documents of a file among training, validation and test, as Megatron does."""

import math

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"  # Megatron's, where --split is not given


def parse_split(text: str) -> tuple[float, float, float]:
    """Return `969,30,1` as three shares that sum to 1; quotes, spaces and "/" are tolerated."""
    parts = text.replace("/", ",").strip(" '\"").split(",")
    try:
        weights = [float(part.strip(" '\"")) for part in parts]
    except ValueError:
        weights = []
    total = sum(weights)
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(
            f"--split {text}: give up to three numbers >= 0, not all 0, for training, validation "
            "and test, as in 969,30,1"
        )
    train, valid, test = (weight / total for weight in [*weights, 0.0, 0.0][:3])
    return train, valid, test


def split_documents(shares: tuple[float, float, float], documents: int) -> dict[str, range]:
    """Return {split: range}: documents 0 to n-1 in three contiguous ranges."""
    edges = [round(sum(shares[:i]) * float(documents)) for i in range(4)]
    return {name: range(edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}
