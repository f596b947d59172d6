# SPDX-License-Identifier: Apache-2.0
"""Data that a run reads twice, or validates on although it trains on it, is refused by the files.

A run that an older version began so goes on, with a line and in its order.
"""

import json
import os
import re
import shutil

import numpy as np
import pytest

import pretrain_llama
from training.data import build
from training.data.indexed import IndexedWriter
from training.data.tokenizer import build_tokenizer
from training.flags.parse import parse

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-3
    --tokenizer-type NullTokenizer --vocab-size 500 --device cpu --eval-iters 1
    --lr-decay-style constant --log-interval 1 --global-batch-size 4""".split()
AGAIN = "so each of its samples is read twice: name it once"
TRAINED = r"trained on \(--train-data-path\): hold out other documents"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Write two corpora, a and b, other names of a, and a copy of it."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        draw = np.random.RandomState(seed)
        with IndexedWriter(name, np.dtype(np.uint16)) as out:
            for length in draw.randint(1, 60, 40):
                out.add(draw.randint(0, 499, length))
    os.mkdir("other")
    for end in (".bin", ".idx"):
        os.symlink(f"a{end}", f"link{end}")
        os.link(f"a{end}", f"hard{end}")
        shutil.copyfile(f"a{end}", f"other/copy{end}")
    tokens = build.IndexedTokens("a").tokens
    for name, cuts in (("wide", build.IndexedTokens("a").lengths.cumsum()[:-1]), ("cut", [0, 9])):
        with IndexedWriter(name, np.dtype(np.int32 if name == "wide" else np.uint16)) as out:
            for document in np.split(tokens, cuts):
                out.add(document)


def datasets(words, said=lambda line: None, **more):
    tokenizer = build_tokenizer("NullTokenizer", None, 500)
    config = parse([*FLAGS, "--train-iters", "4", *words.split()], 1)
    return build.build_datasets(config, tokenizer, said, **more)


NAMES = ("a", "./a", "other/../a", "link", "hard", "other/copy", "wide", "cut")


@pytest.mark.parametrize(
    "words, says, names",
    [
        (
            "--data-path 0.5 a 0.5 {}",
            f"--data-path: .* {AGAIN}, with the sum of its weights$",
            NAMES,
        ),
        (
            "--data-path b {} a --split 1",
            f"--data-path: .* {AGAIN}; give weights to read it more often$",
            NAMES[4:],
        ),
        (
            "--data-path a {} --split 1 --data-order megatron",
            f"--data-path: .* {AGAIN}; give weights to read it more often$",
            NAMES[4:],
        ),
        ("--train-data-path a b --valid-data-path {}", f"--valid-data-path: .* {TRAINED}", NAMES),
        (
            "--train-data-path 2 b 1 a --test-data-path b {}",
            f"--test-data-path: b is {TRAINED}",
            NAMES[:1],
        ),
        (
            "--train-data-path b --valid-data-path a {} --multiple-validation-sets",
            "--multiple-validation-sets: .* leave one out$",
            NAMES,
        ),
        (
            "--train-data-path b --valid-data-path a {} --full-validation",
            f"--valid-data-path: .* {AGAIN}; give weights to read it more often$",
            NAMES[:1],
        ),
    ],
)
def test_the_same_data_is_known_by_what_it_holds(words, says, names):
    for name in names:
        with pytest.raises(ValueError, match=says) as error:
            datasets(words.format(name))
        same = "is named twice" if name == "a" else "holds the same data as"
        assert f"{name} {same}" in str(error.value) or "trained on" in says or "b {} a" in words


def test_other_data_of_the_same_length_is_not_the_same():
    with IndexedWriter("near", np.dtype(np.uint16)) as out:
        pair = build.IndexedTokens("a")
        for i, length in enumerate(pair.lengths):
            out.add(pair.read(i, 0, int(length)) ^ (i == 39))
    found = datasets("--data-path 0.5 a 0.5 near --split 1")["train"]
    assert found.weights == [0.5, 0.5]
    found = datasets("--train-data-path 1 a 0 link --valid-data-path near --test-data-path b")
    assert found["valid"] is not None and found["test"] is not None


def stages(*blends):
    made = [
        {"name": f"s{i}", "start_tokens": 128 * i, "train_data_path": blend.split()}
        for i, blend in enumerate(blends)
    ]
    with open("stages.json", "w") as file:
        json.dump({"stages": made}, file)
    return "--data-stages stages.json"


def test_stages_go_on_in_a_data_set_and_begin_a_copy_again():
    found = datasets(stages("a b", "link", "other/copy"))["train"]
    assert found.starts[1][0] > 0 and found.starts[2] == [0]
    for blend in ("a a", "0.3 a 0.7 link", "a other/copy"):
        with pytest.raises(ValueError, match=r"stage 's1': .*read twice: name it once"):
            datasets(stages("b", blend))
    with pytest.raises(ValueError, match="stage 's1': hard is a hard link to a of .*'s0', so its"):
        datasets(stages("a", "hard"))
    with pytest.raises(ValueError, match=r"hard holds .* trained on \(--data-stages .*'s1'\)"):
        datasets(stages("b", "a") + " --valid-data-path hard")


def test_a_run_that_was_begun_so_goes_on_in_its_order(monkeypatch, capsys):
    """Its losses are those of a run without a stop."""

    def train(words, steps, flags=("--save", "run", "--load", "run")):
        given = [*FLAGS, *words.split(), "--train-iters", str(steps), *flags]
        code = pretrain_llama.main([*given, "--log-json", "log.jsonl"])
        said = capsys.readouterr()
        with open("log.jsonl", "a+") as file:
            file.seek(0)
            rows = [json.loads(line) for line in file]
        os.unlink("log.jsonl")
        return code, said.out + said.err, {r["iteration"]: r["loss"] for r in rows if "loss" in r}

    words = "--train-data-path 0.5 a 0.5 {} --valid-data-path {}"
    with monkeypatch.context() as patch:  # the version before: nobody looks
        patch.setattr(build, "twice", lambda parts, cut: ())
        _, said, whole = train(words.format("link", "b a"), 4, ())
        assert "twice" not in said
        train(words.format("link", "b a"), 2)
    for other in ("a", "other/copy"):  # by its data, wherever it is
        code, said, losses = train(words.format(other, "b a"), 4, ("--load", "run"))
        line = f"--train-data-path: {other} "
        assert code == 0 and line in said and said.count("continues in its order") == 2
        assert losses == {3: whole[3], 4: whole[4]}
    for changed, flags in (
        ("0.4 a 0.6 a --valid-data-path b a", ("--load", "run", "--allow-change", "data")),
        ("0.5 a 0.5 a --valid-data-path b a", ("--load", "run", "--finetune")),
        ("0.5 a 0.5 a --valid-data-path b a", ("--load", "elsewhere")),
        ("0.5 a 0.5 a --valid-data-path a", ("--load", "run")),
    ):
        code, said, _ = train(f"--train-data-path {changed}", 4, flags)
        assert code == 2 and re.search(f"{AGAIN}|is {TRAINED}", said), said
    code, said, losses = train(words.format("a", "b"), 4, ("--load", "run"))
    assert code == 0 and losses[4] == whole[4] and "trained on" not in said
