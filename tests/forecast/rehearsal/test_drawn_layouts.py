# SPDX-License-Identifier: Apache-2.0
"""No finding on layouts drawn at random from every flag that changes a step."""

import pytest

from tests.forecast.rehearsal.drawn_layouts import MODEL, draw

SEED, LAYOUTS = 32, 60


def without_finding(rehearse, seed, wanted):
    """Rehearse drawn layouts until so many are accepted; the others' flags exclude each other."""
    accepted = refused = 0
    for world, rank, flags in draw(seed, 12 * wanted):
        words = " ".join([*MODEL, flags, "--rehearse-rank", str(rank)])
        code, report, text = rehearse(words, world, small=False)
        if code == 2:
            assert "pretrain_llama.py --rehearse: --" in text, (world, rank, flags, text)
            refused += 1
            continue
        assert (report["findings"], code) == ([], 0), (world, rank, flags, text[-2000:])
        accepted += 1
        if accepted == wanted:
            break
    assert accepted == wanted, f"only {accepted} layouts were accepted, {refused} refused"


@pytest.mark.prove
def test_a_drawn_layout_has_no_finding(rehearse):
    without_finding(rehearse, SEED + 1, 1)


@pytest.mark.prove
def test_sixty_drawn_layouts_have_no_finding(rehearse):
    without_finding(rehearse, SEED, LAYOUTS)
