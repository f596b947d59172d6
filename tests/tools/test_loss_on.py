# SPDX-License-Identifier: Apache-2.0
"""--loss-on: texts of several keys become one document and its mask."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tools import preprocess_data
from tools.preprocess_data import main, preprocess
from training.data.indexed import IndexedTokens

NO_TEXT = "a.jsonl, line 1, byte 0: no JSON object with a text"
ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"prompt": "1 2 3", "answer": "4 5", "note": "9"},
    {"prompt": "", "answer": "6", "note": ""},
    {"prompt": "7", "answer": "", "note": "8"},
    {"answer": "1 1 1 1", "prompt": "2", "note": "3 3"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(ROWS)


def lines(rows, name="a.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*words, keys="prompt answer", on="answer", inputs="a.jsonl"):
    return main(
        [*"--output-prefix out --tokenizer-type NullTokenizer --vocab-size 101".split()]
        + ["--input", *inputs.split(), "--json-keys", *keys.split(), "--loss-on", *on.split()]
        + [*words]
    )


def documents(prefix):
    data = IndexedTokens(prefix)
    return [data.read(i, 0, n).tolist() for i, n in enumerate(data.lengths)]


def test_documents_and_their_mask(capsys):
    assert run("--append-eod") == 0
    assert documents("out_prompt_answer_document") == [
        [1, 2, 3, 4, 5, 100],
        [6, 100],
        [2, 1, 1, 1, 1, 100],
    ]
    mask = "out_prompt_answer_document.loss_mask"
    assert documents(mask) == [[0, 0, 0, 1, 1, 1], [1, 1], [0, 1, 1, 1, 1, 1]]
    assert IndexedTokens(mask).dtype == np.uint8
    said = capsys.readouterr().out
    assert "1 document(s) left out: 1 empty (first: a.jsonl, line 3, byte" in said
    assert "3 documents, 14 tokens" in said and "; the loss counts 10 of them (answer)" in said
    record = json.loads(Path("out_prompt_answer_document.json").read_text())
    assert record["loss_on"] == ["answer"] and record["loss_mask"] == IndexedTokens(mask).digest


def test_megatrons_own_files_are_those_of_one_text():
    """The .bin and .idx have the bytes of the texts that are joined beforehand."""
    assert run("--append-eod") == 0
    joined = [{"text": f"{row['prompt']} {row['answer']}"} for row in ROWS if row["answer"]]
    lines(joined, "b.jsonl")
    preprocess(["b.jsonl"], "b", "NullTokenizer", vocab_size=101, append_eod=True)
    for end in (".bin", ".idx"):
        assert Path(f"out_prompt_answer_document{end}").read_bytes() == (
            Path(f"b_text_document{end}").read_bytes()
        )


def test_several_answers_and_an_end_that_is_of_the_last_key():
    row = {"q1": "1", "a1": "2 2", "q2": "3", "a2": "4"}
    lines([row])
    assert run("--append-eod", keys="q1 a1 q2 a2", on="a1 a2") == 0
    assert documents("out_q1_a1_q2_a2_document.loss_mask") == [[0, 1, 1, 0, 1, 1]]
    assert run("--append-eod", keys="q1 a1 q2", on="a1") == 0
    assert documents("out_q1_a1_q2_document") == [[1, 2, 2, 3, 100]]
    assert documents("out_q1_a1_q2_document.loss_mask") == [[0, 1, 1, 0, 0]]
    assert run(keys="q1 a1", on="q1 a1") == 0
    assert documents("out_q1_a1_document.loss_mask") == [[1, 1, 1]]


def files():
    names = [f"out_prompt_answer_document{end}" for end in
             (".bin", ".idx", ".json", ".loss_mask.bin", ".loss_mask.idx")]  # fmt: skip
    return {name: Path(name).read_bytes() for name in names}


def many():
    lines([{"prompt": "5 " * (i % 40), "answer": "7 " * (i % 7)} for i in range(200)])
    Path("z.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    options = dict(json_keys=["prompt", "answer"], loss_on=["answer"], append_eod=True)
    return ["a.jsonl", "z.jsonl.gz"], {**options, "vocab_size": 101, "report": lambda line: None}


@pytest.mark.parametrize(
    ("workers", "size"), [(1, 300), pytest.param(2, 2500, marks=pytest.mark.prove)]
)
def test_workers_and_shards_change_nothing(workers, size):
    inputs, options = many()
    preprocess(inputs, "out", "NullTokenizer", **options)
    once = files()
    preprocess(inputs, "out", "NullTokenizer", workers=workers, shard_bytes=size, **options)
    assert files() == once and not list(Path().glob("*.parts"))
    assert IndexedTokens("out_prompt_answer_document").lengths.tolist() == (
        IndexedTokens("out_prompt_answer_document.loss_mask").lengths.tolist()
    )


def test_goes_on_behind_complete_shards(monkeypatch):
    inputs, options = many()
    preprocess(inputs, "out", "NullTokenizer", shard_bytes=1000, **options)
    once, work, calls = files(), preprocess_data.Task.run, []

    def interrupted(task, tokenizer):
        calls.append(task.prefix)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return work(task, tokenizer)

    monkeypatch.setattr(preprocess_data.Task, "run", interrupted)
    for name in once:
        Path(name).unlink()
    with pytest.raises(KeyboardInterrupt):
        preprocess(inputs, "out", "NullTokenizer", shard_bytes=1000, **options)
    Path(f"{calls[1]}_prompt_answer.loss_mask.idx").unlink()  # this one is not whole any more
    del calls[:]
    monkeypatch.setattr(preprocess_data.Task, "run", lambda *of: calls.append(0) or work(*of))
    said = []
    options["report"] = said.append
    preprocess(inputs, "out", "NullTokenizer", shard_bytes=1000, **options)
    assert files() == once and any(line.startswith("2 of ") for line in said)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": "1"}], f"{NO_TEXT} 'answer' (it has 'prompt'; --json-keys names the key"),
        ([{"prompt": "1", "answer": ["2"]}], f"{NO_TEXT} 'answer' ('answer' is a list)"),
        ([{"prompt": None, "answer": "2"}], f"{NO_TEXT} 'prompt' ('prompt' is null)"),
        (
            [{"prompt": "1", "answer": "x"}],
            "a.jsonl, line 1, byte 0: NullTokenizer reads numbers below 101, not 'x'",
        ),
        (
            [{"prompt": "1", "answer": ""}],
            "no document with text in 1 file(s); 1 document(s) left out: 1 empty (first: a.jsonl, "
            "line 1, byte 0)",
        ),
    ],
)
def test_bad_rows(capsys, rows, sentence):
    lines(rows)
    assert run() == 1
    assert sentence in capsys.readouterr().err


def test_bad_rows_are_counted_on_request(capsys):
    lines([*ROWS, {"prompt": "1"}, {"prompt": "1", "answer": 3}])
    assert run("--on-bad-document", "skip") == 0
    said = capsys.readouterr().out
    assert "3 document(s) left out: 1 empty (first: a.jsonl, line 3, " in said
    assert "1 without a text (first: a.jsonl, line 5, " in said
    assert run("--on-bad-document", "error") == 1
    assert "no text that counts in the loss: 'answer' empty" in capsys.readouterr().err


def test_rows_of_parquet(capsys):
    """Their columns come in the order of the flag, not of the file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    assert run("--append-eod") == 0
    wanted = files()
    columns = {key: [row[key] for row in ROWS] for key in ("note", "answer", "prompt")}
    parquet.write_table(pyarrow.table(columns), "a.parquet")
    assert run("--append-eod", inputs="a.parquet") == 0
    assert files() == wanted
    columns["prompt"][1] = None
    parquet.write_table(pyarrow.table(columns), "a.parquet")
    assert run(inputs="a.parquet") == 1
    assert "a.parquet, row 2: null in place of a text" in capsys.readouterr().err


def test_flags_that_do_not_fit(capsys):
    assert run(on="answr") == 1
    assert (
        "--loss-on answr: --json-keys prompt answer does not name this key"
        in capsys.readouterr().err
    )
    Path("c.txt").write_text("1 2")
    assert run(inputs="a.jsonl c.txt") == 1
    assert "--loss-on answer: c.txt has no keys" in capsys.readouterr().err


def test_files_of_others_are_not_replaced(capsys):
    mask = Path("out_prompt_answer_document.loss_mask.bin")
    mask.write_bytes(b"mine")
    assert run() == 1
    assert f"--output-prefix {mask}" in capsys.readouterr().err
    assert mask.read_bytes() == b"mine" and not Path("out_prompt_answer_document.bin").exists()
    mask.unlink()
    assert run() == 0 and run("--append-eod") == 0  # the second replaces what the first wrote


def test_prompt_and_answer_are_encoded_each_for_itself():
    """As generation sees them: the prompt's ids, then the answer's; no special token between."""
    from transformers import AutoTokenizer

    shutil.copytree(ROOT / "tests/data/tokenizer", "tokenizer")
    theirs = AutoTokenizer.from_pretrained("tokenizer")
    rows = [
        {"prompt": "The cap", "answer": "ital? Paris."},
        {"prompt": "a ", "answer": "b"},
    ]
    lines(rows)
    (made,) = preprocess(
        ["a.jsonl"], "out", "HuggingFaceTokenizer", "tokenizer", append_eod=True,
        json_keys=["prompt", "answer"], loss_on=["answer"],
    )  # fmt: skip
    found, masks = documents(made.prefix), documents(f"{made.prefix}.loss_mask")
    for row, ids, mask in zip(rows, found, masks, strict=True):
        prompt, answer = (
            theirs(row[key], add_special_tokens=False)["input_ids"] for key in ("prompt", "answer")
        )
        assert ids == [*prompt, *answer, theirs.eos_token_id]
        assert mask == [0] * len(prompt) + [1] * (len(answer) + 1)


def test_megatron_core_reads_the_mask():
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert run("--append-eod") == 0
    mask = indexed.IndexedDataset("out_prompt_answer_document.loss_mask")
    assert [mask[i].tolist() for i in range(len(mask))] == (
        documents("out_prompt_answer_document.loss_mask")
    )
