# SPDX-License-Identifier: Apache-2.0
"""`make train DATA=...`: one file is enough, long lines are cut, mistakes come before set-up."""

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tools import train_tokenizer
from tools.build_corpus import build_listed, pieces
from training.data.bad_documents import BadDocuments

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "500 characters": "a word " * 72,
    "one line": "x" * 100_000,
    "one line of words": "some words " * 9_000,
    "the same line": "again\n" * 1_000,
    "many lines": "".join(f"line {n}\n" for n in range(3_000)),
}


def held(folder: Path) -> tuple[str, str]:
    train, heldout = (
        "".join(json.loads(line)["text"] for line in (folder / f"{name}.jsonl").open())
        for name in ("train", "heldout")
    )
    return train, heldout


@pytest.mark.parametrize("name", TEXTS)
def test_one_file_is_enough(tmp_path: Path, name: str) -> None:
    text = TEXTS[name]
    (tmp_path / "a b.txt").write_text(text)
    about = build_listed([str(tmp_path)], tmp_path / "out", 5.0, BadDocuments())
    train, heldout = held(tmp_path / "out")
    assert train and heldout and len(train) + len(heldout) == len(text)
    assert len(heldout) < len(text) / 2 and about["bytes"] == len(text)
    again = build_listed([str(tmp_path / "a b.txt")], tmp_path / "again", 5.0, BadDocuments())
    assert again == about


def test_about_a_tenth_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n} of a play\n" for n in range(20_000)))
    words = command(ROOT / "tools" / "build_corpus.py", "--input", tmp_path / "a.txt")
    done = subprocess.run([*words, "--output-dir", str(tmp_path / "out")], capture_output=True)
    assert done.returncode == 0, done.stderr
    train, heldout = held(tmp_path / "out")
    text = (tmp_path / "a.txt").read_text()
    assert train == text[: int(0.9 * len(text))] and heldout == text[len(train) :]  # the last tenth
    (tmp_path / "b.txt").write_text(text[:90_000])
    several = tmp_path / "several"
    build_listed([str(tmp_path / f"{name}.txt") for name in "ab"], several, 10.0, BadDocuments())
    train, heldout = held(several)
    assert 0.05 < len(heldout) / (len(train) + len(heldout)) < 0.15
    for percent in ("100", "nan"):
        done = subprocess.run(
            [*words, "--output-dir", str(tmp_path / "no"), "--heldout-percent", percent],
            capture_output=True,
        )
        assert b"--heldout-percent " + percent.encode() + b" must lie" in done.stderr
        assert done.returncode == 2 and not (tmp_path / "no").exists()


def test_long_lines_are_cut(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / "a.txt").write_text(text)
        found = [piece for _, piece in pieces([str(tmp_path / "a.txt")], 1000)]
        assert "".join(found) == text and max(map(len, found)) <= 2000
        if "words" in name:
            assert all(piece.endswith(" ") for piece in found)


def test_a_text_of_many_signs_gets_a_tokenizer(tmp_path: Path) -> None:
    """SentencePiece refuses a text of more different characters than it may have pieces."""
    text = "".join(chr(0x4E00 + n * 7919 % 3000) for n in range(12_000))
    (tmp_path / "a.txt").write_text("\n".join(text[at : at + 60] for at in range(0, 12_000, 60)))
    texts = train_tokenizer.Texts([tmp_path / "a.txt"])
    assert train_tokenizer.train(texts, tmp_path / "t", 1000) == 1000
    train_tokenizer.check(tmp_path / "t.model", texts)


def command(*words: object, stderr: int = subprocess.PIPE) -> list[str]:
    return [sys.executable, *map(str, words)]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("no such file.txt", "make train: DATA no: cannot be read (No such file or directory)"),
        ("it's.csv", "it's.csv: neither .txt nor .jsonl"),
        ("bare folder", "bare folder: a folder without a file of text"),
    ],
)
def test_make_train_checks_its_data_before_set_up(tmp_path: Path, data: str, says: str) -> None:
    (tmp_path / "bare folder").mkdir()
    (tmp_path / "it's.csv").write_text("a")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for room in ("tools", "forecast", "training"):
        (tmp_path / room).symlink_to(ROOT / room)
    done = subprocess.run(
        ["make", "train", f"DATA={data}", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        timeout=60,
    )
    assert done.returncode == 2 and says in done.stderr.splitlines()[0]
    assert not (tmp_path / ".venv").exists() and "torch" not in done.stdout


def test_progress_is_one_line_on_a_terminal_and_none_on_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 200_000)
    soon = "from training.run import waiting as w; w.AFTER = w.LIVE = 0.01; "
    soon += "import tools.build_corpus as b"
    words = [sys.executable, "-c", f"{soon}; b.main()", "--input", str(tmp_path), "--output-dir"]
    quick = command(ROOT / "tools" / "build_corpus.py", "--input", tmp_path, "--output-dir")
    piped = subprocess.run([*quick, str(tmp_path / "a")], capture_output=True, text=True)
    assert (piped.returncode, piped.stderr) == (0, "") and piped.stdout.startswith("corpus: ")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words.append(str(tmp_path / "b"))
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT)
    shown = os.read(ours, 1 << 16)
    os.close(theirs)
    os.close(ours)
    assert b"reading the texts: 0 s, " in shown and b" MB, about 0 s left" in shown
    assert b"\n" not in shown
