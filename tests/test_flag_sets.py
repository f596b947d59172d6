# SPDX-License-Identifier: Apache-2.0
"""Random sets of flags: no traceback, and what the dry run takes or refuses the run does too."""

import pytest

from tests.flag_sets import flag_set, play


def test_dry_runs_of_random_sets(tmp_path):
    assert not play(range(2), None, tmp_path)


@pytest.mark.prove
def test_dry_runs_of_many_random_sets(tmp_path):
    assert not play(range(400), None, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_dry_run_and_run_agree(launcher, tmp_path, first):
    assert not play(range(first, first + 20), launcher, tmp_path)


def test_the_sets_are_valid_and_not():
    """A seed gives the same set, and the sets differ in ranks and flags."""
    assert flag_set(3) == flag_set(3)
    sets = [flag_set(seed) for seed in range(50)]
    assert {world for world, _ in sets} == {1, 2, 4}
    assert len({" ".join(words) for _, words in sets}) == 50
