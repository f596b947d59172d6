# SPDX-License-Identifier: Apache-2.0
"""Draw command lines from the table of flags, most with something wrong, and judge the answers.

A draw depends on its seed alone. `build` makes the files that flags may name: good ones, and empty,
torn, hostile ones, directories, pipes and links.
"""

import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

import pretrain_llama
from training.data.indexed import IndexedWriter
from training.flags.flag_table import Flag, live_flags
from training.settings.setting import DIRECTORY, FILE, Choice, Number

SECONDS = 60  # that an answer may take, on a busy machine
GOOD = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--train-iters": "3",
    "--lr": "1e-3",
    "--data-path": "data/good",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "500",
    "--device": "cpu",
}
NUMBERS = """0 1 2 3 4 7 8 16 64 100 1000 4096 65536 1000000 2147483647 2147483648 4294967295 -1 -2
    9223372036854775807 9223372036854775808 18446744073709551616 -9223372036854775809 1e30 1e-30
    1e400 -1e400 nan inf -inf 0.5 0.999999 1.0 -0 -0.0 1_000 0x10 01 +3 1e3 1,000 1.5 .5 5e-324
    1e308""".split()
ODD = ["", " ", "--", "-", "---", "=", "\x1b[31mred\x1b[0m", "a\nb", "\u0663", "\u202ertl"]
ODD += ["x" * 5000, "1" * 5000, "%s%n{0}", "None", "true", "\udc80", "../../etc/passwd", "a\tb"]
ODD += ["0:1", "[[[", "1 1", "a\0b", "\ud800", "NaN", "()", "'"]
WORDS = """1,0,0 0,0,0 -1,2 969,30,1 1e308,1e308 nan,1 E|L Et*2L (t)*99999999999L Ett|L 0:1 1:2
    0:999999999999999999999 seed data tokenizer trigger:1 trigger:99999999999 Et|tL""".split()
WORDS += ["E" + "(" * 3000, "0:768 250B:1536", "0:4 96:8", "E(" + "t" * 9 + ")*9" * 9 + "L"]
PATHS = """data/good data/gone data/pipe data/folder data/empty data/torn good.model gone empty pipe
    folder link loop saved hf deep/er/new nul.json deep.json panic.json twice.json huge.json mega
    /dev/null /proc/self/mem .""".split()
PATHS.append("esc\x1b[2Jape")


def build(place: Path) -> None:
    """Make the files."""
    (place / "data").mkdir()
    rng = np.random.default_rng(0)
    with IndexedWriter(str(place / "data" / "good"), np.dtype(np.uint16)) as out:
        for _ in range(40):
            out.add(rng.integers(0, 499, 60))
    index = (place / "data" / "good.idx").read_bytes()
    tokens = (place / "data" / "good.bin").read_bytes()
    for ending, data in ((".idx", index), (".bin", tokens)):
        os.mkfifo(place / "data" / f"pipe{ending}")
        (place / "data" / f"folder{ending}").mkdir()
        (place / "data" / f"empty{ending}").touch()
        (place / "data" / f"torn{ending}").write_bytes(data[: len(data) // 2])
        (place / f"esc\x1b[2Jape{ending}").write_bytes(data[:50])
    (place / "esc\x1b[2Jape").write_text("x")
    os.mkfifo(place / "pipe")
    (place / "folder").mkdir()
    (place / "empty").touch()
    (place / "link").symlink_to("good.model")
    (place / "loop").symlink_to("loop")
    (place / "good.model").write_bytes(rng.bytes(3000))
    (place / "nul.json").write_bytes(b"\0" * 100)
    (place / "deep.json").write_text('{"a":' * 20_000)
    (place / "panic.json").write_text(PANICS)
    (place / "twice.json").write_text('{"format": 1, "format": 2}')
    (place / "huge.json").write_text('{"<|endoftext|>": 4294967295, "a": 0}')
    for name, config in (("hf", '{"num_hidden_layers": 1000000000}'), ("mega", "[]")):
        (place / name).mkdir()
        (place / name / "config.json").write_text(config)


PANICS = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}"""


def value(flag: Flag, rng: random.Random, wild: float) -> list[str]:
    """Draw the words of a value: one that may suit the flag, or with `wild` one that may not."""
    rule, dice = flag.rule, rng.random() / wild
    if rule.nargs == 0:
        return [] if dice > 0.05 else [rng.choice(ODD)]
    if dice < 0.15:
        return [rng.choice(rng.choice([NUMBERS, ODD, WORDS, PATHS]))]
    if dice < 0.2:
        return [rng.choice([*NUMBERS, *ODD]) for _ in range(rng.randrange(4))]
    if isinstance(rule, Choice):
        return [rng.choice(rule.choices)]
    if isinstance(rule, Number) and rule.nargs is None:
        if dice < 0.5:
            return [rng.choice(NUMBERS)]
        ends = [int(end) for end in (rule.low, rule.high) if end is not None]
        near = str(rng.choice(ends) + rng.randrange(-1, 2))  # a bound, or what is beyond it
        some = [str(rng.randrange(9)), str(rng.randrange(1, 5) * 8), near]
        return [rng.choice(some) if rule.integer else str(rng.random())]
    paths = rule in (FILE, DIRECTORY) or "prefix" in flag.row.unit or "data-path" in flag.name
    names = PATHS if paths else WORDS
    many = rng.randrange(1, 4) if rule.nargs == "*" else 1
    return [rng.choice(names) for _ in range(many)]


def draw(seed: int) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment of a case."""
    others = ("--dry-run", "--rehearse")  # other programs, with tests of their own
    rng, flags = random.Random(seed), [f for f in live_flags().values() if f.name not in others]
    given = {name: [text] for name, text in GOOD.items()}
    wild = rng.random()  # how often a value is drawn that may not suit
    for flag in rng.sample(flags, rng.randrange(1, 7)):
        given[flag.name] = value(flag, rng, wild)
    for name in list(given):
        if rng.random() < 0.02:
            del given[name]
    if "--mock-data" in given and rng.random() < 0.8:
        given.pop("--data-path", None)
    words = []
    for name, values in given.items():
        joined = len(values) == 1 and rng.random() < 0.3
        words += [f"{name}={values[0]}"] if joined else [name, *values]
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words)), rng.choice([*ODD, "--no-such", "--fp16", "--mmap"]))
    if rng.random() < 0.5:
        words.append("--dry-run")
    world = rng.choice(["1"] * 12 + ["2", "3", "4", "8", "64", "0", "-1", "many", "1" * 30])
    return words, {"WORLD_SIZE": world}


class Late(BaseException):
    """An answer did not come in time."""


def _late(*_: Any) -> None:
    raise Late


def judge(
    run: Callable[[], int], expected: Sequence[int], seconds: int = SECONDS, tool: str = ""
) -> str:
    """Run; return what is wrong with the answer, or "". tool: may also warn, in lines of its own.

    An answer comes in time, has an expected code, prints nothing that a terminal obeys, and where
    it is 2 says why in one sentence.
    """
    out, err = StringIO(), StringIO()
    kept, signal_before = (sys.stdout, sys.stderr), signal.signal(signal.SIGALRM, _late)
    sys.stdout, sys.stderr = out, err
    signal.alarm(seconds)
    try:
        code = run()
    except Late:
        return f"no answer in {seconds} s: {''.join(traceback.format_exc()[-1500:])}"
    except BaseException:
        return f"a traceback: {traceback.format_exc()[-3000:]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal_before)
        sys.stdout, sys.stderr = kept
    said = err.getvalue()
    if code not in expected:
        return f"code {code}: {said}"
    lines, begin = said.splitlines(), f"{tool or 'pretrain_llama.py'}: "
    if code == 2 and not (all(line.startswith(begin) for line in lines) and lines):
        return f"not a sentence: {said!r}"
    if code == 2 and not tool and len(lines) > 1:
        return f"not one sentence: {said!r}"
    for text in (out.getvalue(), said):
        if bad := re.search(r"[^\x20-\x7e\n\u00a1-\U0010ffff]|[\u202a-\u202e\ud800-\udfff]", text):
            return f"it prints {bad[0]!r}: {text[max(0, bad.start() - 100) : bad.end() + 100]!r}"
    if len(said) > 2000:
        return f"a sentence of {len(said)} characters: {said[:300]}"
    return ""


def answer(words: list[str]) -> str:
    """Return what is wrong with the program's answer up to the first step, or ""."""
    return judge(lambda: pretrain_llama.main(words), (0, 2))
