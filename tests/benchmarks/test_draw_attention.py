# SPDX-License-Identifier: Apache-2.0
"""benchmarks/draw_attention.py: the pictures in docs/, the shares that it prints, and refusals."""

import re
from pathlib import Path

import pytest

from benchmarks.draw_attention import DOCS, main
from mpu.layers.attention.shards import context_blocks, shards

PICTURES = Path(__file__).parents[2] / "docs/attention"
PAGE = Path(__file__).parents[2] / "docs/long_context.md"


def shapes(svg: Path) -> dict[str, str]:
    """Return the outline of each named shape."""
    return dict(re.findall(r'<g id="(rank\S+)">\s*<path d="([^"]+)"', svg.read_text()))


def test_the_pictures_in_docs_are_the_blocks(tmp_path, capsys):
    assert main(["--all", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert sorted(path.stem for path in PICTURES.glob("*.svg")) == sorted(DOCS)
    for name, documents in DOCS.items():
        found = shapes(PICTURES / f"{name}.svg")
        assert found == shapes(tmp_path / f"{name}.svg")
        assert f"attention/{name}.svg" in PAGE.read_text()
        for rank in range(4):
            blocks = context_blocks(rank, 4, documents)
            want = {f"rank{rank}-block{i}-{part}" for i, (_, _, part) in enumerate(blocks)}
            want |= {f"rank{rank}-holds{i}" for i in range(len(shards(4, documents)[rank]))}
            assert {key for key in found if key.startswith(f"rank{rank}-")} == want
    assert "causal: 16 tokens a rank; the busiest rank's attention over the mean: 1.000" in said


def test_prints_shares_and_draws(tmp_path, capsys):
    picture = tmp_path / "a" / "b.svg"
    assert main(["--cp", "2", "--documents", "5,3", "--window", "2", "--out", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Attention of 8 tokens in 2 documents over 2 ranks, a window of 2"
    assert said[2] == "rank 0: 50.0% of the work in 7 blocks, tokens 1-1 4-5 7-7"
    assert "rank1-block0-tril" in shapes(picture)


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--documents", "7"], "a row of 7 tokens does not divide over 4 context-parallel ranks"),
        (["--cp", "0"], "--cp 0 --window 0: at least 1"),
        (["--out", "a.pdf"], "a.pdf: a picture must be a .png or .svg file"),
    ],
)
def test_refusals_are_a_line(capsys, flags, told):
    assert main(flags) == 2
    assert capsys.readouterr().err.startswith(f"draw_attention.py: {told}")


@pytest.mark.parametrize("text", ["", "3,0", "a", "99999", "1,,2", "1e3"])
def test_lengths_are_whole_numbers(text):
    with pytest.raises(SystemExit):
        main(["--documents", text])
