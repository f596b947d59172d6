# SPDX-License-Identifier: Apache-2.0
"""Every line of output that README and docs show is made here by what prints it, and compared.

SHOWN lists the blocks, each by its page and by how it begins, with the function that makes it. A
number stands for any number, "(...)" for any words, and a word in capitals, such as METHOD, for any
word. A block of a page that looks like output and is not in the list fails.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from tests.test_readme import PAGES, ROOT
from tools.preprocess_data import preprocess
from training.data.text_files import find_files
from training.run.stop import StopSignal
from training.settings.config import CheckpointConfig

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-3
    --micro-batch-size 2 --mock-data --vocab-size 64 --device cpu --num-workers 0""".split()
# how output begins: the trainer's, the tools', a failing rank's
OUTPUT = re.compile(
    r"iteration +\d|validation at|overlap: |\[rank \d|the checkpoint of|in a rerun|tp 2: |"
    r"stopped by|pretrain_llama\.py: |torchrun: |\S+: \d+ (document|file)|finished: |"
    r" *\d+  (forward|backward|grad) "
)


def blocks(page: str) -> list[str]:
    """Return the indented and the fenced blocks of a page."""
    found, fenced = [], False
    for line in [*(ROOT / page).read_text().splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
            found.append("")
        elif fenced or line.startswith("    "):
            text = line if fenced else line.removeprefix("    ")
            found[-1:] = [(found[-1] if found else "") + text + "\n"]
        elif not found or found[-1]:
            found.append("")
    return [block for block in found if block.strip()]


def flat(text: str) -> str:
    """Return a text in one line, without the breaks that a page makes."""
    return " ".join(text.split())


def pattern(shown: str) -> str:
    """Return the regular expression of a shown text."""
    text = re.escape(flat(shown))
    text = re.sub(r"\\\(\\\.\\\.\\\.\\\)|\\\.\\\.\\\.", ".*?", text)  # (...), ...
    text = re.sub(r"\b(NAME|KEY|METHOD|REASON)\b", ".+?", text)
    return re.sub(r"(?<!\w)\d(?:[\d:e]|,(?=\d)|\\[.-](?=\d))*[kMG]?", r"[-+\\d,.:e]+[kMG]?", text)


def run(capfd, *more: str) -> str:
    """Run the trainer in this process; return what it prints."""
    pretrain_llama.main([*FLAGS, *more])
    said = capfd.readouterr()
    return said.out + said.err


def a_run(capfd, monkeypatch, folder: Path) -> str:
    return run(capfd, "--train-iters", "2", "--log-interval", "1", "--save", str(folder / "a"))


def a_mistake(capfd, monkeypatch, folder: Path) -> str:
    said = run(capfd, "--train-iters", "8", "--lr-warmup-iters", "99", "--lr-decay-iters", "8")
    return f"{said} torchrun: rank 0: {said.removeprefix('pretrain_llama.py: ')}"


def bad_documents(capfd, monkeypatch, folder: Path) -> str:
    (folder / "texts").mkdir()
    good = json.dumps({"text": "1 2 3"}).encode()
    bad = [b'{"text": "\xff"}'] * 5 + [b'{"text": ""}'] * 2
    (folder / "texts" / "a.jsonl").write_bytes(b"\n".join([good] * 40 + bad) + b"\n")
    monkeypatch.chdir(folder / "texts")
    lines: list[str] = []
    preprocess(
        ["a.jsonl"], "data/mine", "NullTokenizer", vocab_size=9, on_bad_document="skip",
        report=lines.append,
    )  # fmt: skip
    return " ".join(lines)


def a_folder(capfd, monkeypatch, folder: Path) -> str:
    for name in ".git/a.txt .git/b.txt README.md a.jsonl c.txt d.txt e.txt f.txt".split():
        (folder / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "texts" / name).write_text("one")
    (folder / "texts" / "b.jsonl").symlink_to("a.jsonl")
    monkeypatch.chdir(folder)
    lines: list[str] = []
    find_files(["texts"], report=lines.append)
    return " ".join(lines)


def a_signal(capfd, monkeypatch, folder: Path) -> str:
    stop = StopSignal()
    stop._name = "SIGUSR1"
    return stop.end(True, "iteration 12 of 40", CheckpointConfig(save="a", load="a"))


def a_save_refused(capfd, monkeypatch, folder: Path) -> str:
    """A weight becomes NaN in the last step."""
    train_step = pretrain_llama.train_step

    def spoil(run, *args):
        out = train_step(run, *args)
        if run.iteration == 3:
            run.model.norm.weight.data[3] = np.nan
        return out

    monkeypatch.setattr(pretrain_llama, "train_step", spoil)
    monkeypatch.chdir(folder)
    return run(capfd, "--train-iters", "4", "--save", "runs/a")


Maker = Callable[..., str]
SHOWN: list[tuple[str, str, Maker]] = [
    ("docs/watching.md", "iteration  500/1000", a_run),
    ("docs/watching.md", "pretrain_llama.py: --lr-warmup-iters", a_mistake),
    ("docs/data.md", "data/mine_text_document: 7", bad_documents),
    ("docs/data.md", "--input: 5 file(s) read", a_folder),
    ("docs/slurm.md", "stopped by SIGUSR1", a_signal),
    ("docs/stability.md", "the checkpoint of step 4", a_save_refused),
]
# made elsewhere, where the fault that they tell is made: the page, the begin, the test
ELSEWHERE = [
    ("README.md", "12  backward  head", "tests/test_readme.py", "test_the_lines_of_explain_are"),
    ("README.md", "tp 2: the loss of", "tests/test_readme.py", "test_the_catch_of_a_wrong_model"),
    ("docs/reliability.md", "[rank 0] rank 1 hangs", "tests/faults/test_hangs.py", "hangs"),
    ("docs/starting.md", "[rank 0 on node0] waiting", "tests/faults", "connected, after"),
    ("docs/stability.md", "in a rerun the first", "tests/training", "the first non-finite"),
    ("docs/continuing.md", "validation at iteration 0", "tests/test_continuing_page.py", "shows"),
    ("docs/overlap.md", "overlap: ", "tests/training/run", "less time expected"),
]


@pytest.mark.parametrize("page, begin, maker", SHOWN, ids=[begin for _, begin, _ in SHOWN])
def test_what_a_page_shows_is_what_is_printed(page, begin, maker, capfd, monkeypatch, tmp_path):
    (block,) = (text for text in blocks(page) if flat(text).startswith(flat(begin)))
    made = flat(maker(capfd, monkeypatch, tmp_path))
    lines = [line for line in block.splitlines() if line.strip()]
    wanted = pattern(" ".join(line for line in lines if not line.startswith("...")))
    assert re.search(wanted, made), f"{wanted}\n{made}"


def test_every_block_that_looks_like_output_is_in_the_list():
    listed = [(page, flat(begin)) for page, begin, _ in SHOWN]
    listed += [(page, flat(begin)) for page, begin, *_ in ELSEWHERE]
    seen = set()
    for page in PAGES:
        for block in blocks(page):
            if not OUTPUT.match(block):
                continue
            names = [each for each in listed if page == each[0] and flat(block).startswith(each[1])]
            assert names, f"{page} shows what no test makes: {block[:80]}"
            seen.update(names)
    assert seen == set(listed)


def test_the_tests_that_make_the_others_are_there():
    for _, _, place, words in ELSEWHERE:
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        assert any(words in file.read_text() for file in files), (place, words)
