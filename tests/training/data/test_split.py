# SPDX-License-Identifier: Apache-2.0
"""Splits: Megatron's cut, and a readable refusal."""

import pytest

from training.data.split import parse_split, split_documents


@pytest.mark.parametrize(
    "text", ["969,30,1", "'969,30,1'", '"969, 30, 1"', " 969/30/1 ", '"969","30","1"']
)
def test_quotes_and_spaces_are_tolerated(text):
    assert parse_split(text) == (0.969, 0.03, 0.001)


def test_missing_shares_are_zero():
    assert parse_split("1") == (1, 0, 0)
    assert parse_split("3,1") == (0.75, 0.25, 0)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1"])
def test_a_bad_split_is_refused(text):
    with pytest.raises(ValueError, match="--split .*: give up to three numbers"):
        parse_split(text)


def test_cut_is_contiguous_and_complete():
    assert split_documents((0.969, 0.03, 0.001), 1000) == {
        "train": range(969),
        "valid": range(969, 999),
        "test": range(999, 1000),
    }
    for n in range(200):
        cut = split_documents(parse_split("7,2,1"), n)
        assert [i for part in cut.values() for i in part] == list(range(n))
        assert len(split_documents((0.6, 0.4, 0.0), n)["test"]) == 0
