# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_shakespeare.py: the characters of a text are its tokens."""

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_shakespeare import prepare
from training.data.cache import IndexCache
from training.data.indexed import IndexedTokens
from training.data.tokenizer import HuggingFaceTokenizer

ROOT = Path(__file__).resolve().parents[2]


def text_of(size: int) -> str:
    """Return words in a random order, with line ends and a letter of two bytes."""
    draw = random.Random(0)
    words = "the king is dead, long live the kïng! \n and so to bed.\n".split(" ")
    return " ".join(draw.choice(words) for _ in range(size))


def test_tokens_are_characters_and_nine_tenths_are_trained_on(tmp_path):
    text = text_of(4000)
    sizes = prepare(text, tmp_path)
    assert sizes == {"train": int(0.9 * len(text)), "heldout": len(text) - int(0.9 * len(text))}
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert tokenizer.vocab_size == len(set(text)) + 1 and tokenizer.eod == len(set(text))
    got = ""
    for name in sizes:
        file = IndexedTokens(str(tmp_path / name), IndexCache(str(tmp_path / "cache")))
        assert len(file) == 1
        got += tokenizer.decode(file.read(0, 0, int(file.lengths[0])).tolist())
    assert got == text and tokenizer.decode(tokenizer.encode(text[:500])) == text[:500]


def test_a_short_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    words = [sys.executable, str(ROOT / "benchmarks" / "bench_shakespeare.py")]
    words += [str(tmp_path / "short.txt"), "--output", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "the text has 9 characters: 10,000 are needed" in done.stderr


@pytest.mark.prove
def test_the_whole_script_on_a_small_text(tmp_path):
    (tmp_path / "words.txt").write_text(text_of(4000))
    words = [sys.executable, str(ROOT / "benchmarks" / "bench_shakespeare.py")]
    words += [str(tmp_path / "words.txt"), "--output", str(tmp_path / "out"), "--steps", "150"]
    done = subprocess.run([*words, "--seconds", "5"], capture_output=True, text=True, check=True)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    published, same, own = rows[1], rows[2], rows[3]
    assert float(published[4]) == 1.88
    for row in (same, own):  # the letter of two bytes: a byte has less than a character
        assert 0 < float(row[5]) < float(row[4]) / math.log(2) + 1e-3 and float(row[4]) < 3
    assert (tmp_path / "out" / "loss.png").is_file()
