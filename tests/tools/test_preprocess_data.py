# SPDX-License-Identifier: Apache-2.0
"""Text to .bin/.idx: the same bytes whatever the workers, shards and interruptions."""

import gzip
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import sampled
from tools import preprocess_data
from tools.preprocess_data import main, preprocess
from training.data.indexed import IndexedTokens

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inputs(tmp_path):
    """Write number texts: a .jsonl of 60 documents with two keys, a .jsonl.gz and a .txt."""
    rows = [{"text": " ".join(map(str, range(i))), "title": str(i)} for i in range(60)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
    (tmp_path / "c.txt").write_text("7 8\n9\n")
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]


def null(inputs, output, **options):
    options = {"append_eod": True, "report": lambda line: None, **options}
    return preprocess(inputs, str(output), "NullTokenizer", vocab_size=101, **options)


def pair(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def test_documents_come_in_order_and_end(tmp_path, inputs):
    (summary,) = null(inputs, tmp_path / "out")
    assert summary.prefix == str(tmp_path / "out_text_document")
    data = IndexedTokens(summary.prefix)
    documents = [data.read(i, 0, data.lengths[i]).tolist() for i in range(len(data))]
    counted = [[*range(i), 100] for i in range(1, 60)]  # a document without text is left out
    assert documents == [*counted, *counted[:2], [7, 8, 9, 100]]
    assert (summary.documents, summary.tokens) == (62, sum(map(len, documents)))


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "SentencePieceTokenizer"])
def test_the_bytes_are_those_of_megatrons_tool(tmp_path, kind):
    """Its format written out: int32 lengths, int64 offsets and document ends, tokens of uint16. A
    document is the ids of its text and </s>, without <s>, also under the name Llama2Tokenizer.

    Megatron-LM's tools/preprocess_data.py (commit d98e8a64dd) has written the same for real text.
    """
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three", "two three"] * 20),
        model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    texts = ["one two", "three three one two"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (made,) = preprocess(
        [str(tmp_path / "a.jsonl")], str(tmp_path / "out"), kind, str(tmp_path / "tokenizer.model"),
        append_eod=True, report=lambda line: None,
    )  # fmt: skip
    library = SentencePieceProcessor(model_proto=model.getvalue())
    rows = [[*library.encode(text), library.eos_id()] for text in texts]
    first, second = map(len, rows)
    tokens = struct.pack(f"<{first + second}H", *rows[0], *rows[1])
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    index += struct.pack("<2i2q3q", first, second, 0, 2 * first, 0, 1, 2)
    assert pair(made.prefix) == [tokens, index]


def test_keys_lines_and_no_eod(tmp_path, inputs):
    text, title = null(inputs[:2], tmp_path / "out", json_keys=["text", "title"], append_eod=False)
    assert title.prefix == str(tmp_path / "out_title_document")
    data = IndexedTokens(title.prefix)
    assert data.tokens.tolist() == [*range(60), 0, 1, 2] and text.documents == 61
    (lines,) = null(inputs[2:], tmp_path / "lines", lines=True)
    assert IndexedTokens(lines.prefix).tokens.tolist() == [7, 8, 100, 9, 100]


@pytest.mark.parametrize(("workers", "size"), sampled([(2, 1500), (1, 100), (1, 1001)], 3))
def test_workers_and_shards_change_nothing(tmp_path, inputs, workers, size):
    (once,) = null(inputs, tmp_path / "once")
    (cut,) = null(inputs, tmp_path / "cut", workers=workers, shard_bytes=size)
    assert pair(cut.prefix) == pair(once.prefix)
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize(("lines", "shards"), sampled([(700, 2), (500, 1)], 2))
def test_a_file_is_cut_from_a_megabyte_on(tmp_path, monkeypatch, lines, shards):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "1 " * 1000}) + "\n") * lines)
    run, seen = preprocess_data.Task.run, []
    monkeypatch.setattr(preprocess_data.Task, "run", lambda *of: seen.append(of) or run(*of))
    (summary,) = null([str(tmp_path / "a.jsonl")], tmp_path / "out")
    assert len(seen) == shards and summary.tokens == lines * 1001


def test_goes_on_behind_complete_shards(tmp_path, inputs, monkeypatch):
    (once,) = null(inputs, tmp_path / "once")
    run, calls = preprocess_data.Task.run, []

    def interrupted(task, tokenizer):
        calls.append(task.prefix)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(task, tokenizer)

    monkeypatch.setattr(preprocess_data.Task, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        null(inputs, tmp_path / "out", shard_bytes=1000)
    assert not list(tmp_path.glob("out_text*")) and len(list(tmp_path.glob("out.*.parts"))) == 1
    torn = next(tmp_path.glob("out.*.parts/000000_text.bin"))
    torn.write_bytes(torn.read_bytes()[:-1])
    said = []
    (resumed,) = null(inputs, tmp_path / "out", shard_bytes=1000, report=said.append)
    assert said[0].startswith("2 of ") and said[0].endswith("shards were complete already")
    assert pair(resumed.prefix) == pair(once.prefix)
    assert not list(tmp_path.glob("*.parts"))


def test_it_starts_without_torch():
    """Its import takes two seconds, in each worker again."""
    code = "import tools.preprocess_data, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_parts_of_another_run_are_not_taken(tmp_path, inputs, monkeypatch):
    """Other flags or a changed file start afresh, and the old parts go."""
    folders = set()

    def stop(task, tokenizer):
        folders.update(path.name for path in tmp_path.glob("out.*.parts"))
        folders.add(Path(task.prefix).parent.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_data.Task, "run", stop)
    changes = [{}, {"append_eod": False}, {"shard_bytes": 99}, {"lines": True}]
    for options in changes:
        with pytest.raises(KeyboardInterrupt):
            null(inputs, tmp_path / "out", **options)
    Path(inputs[0]).write_text('{"text": "1"}\n')
    with pytest.raises(KeyboardInterrupt):
        null(inputs, tmp_path / "out")
    assert len(folders) == 5 and len(list(tmp_path.glob("out.*.parts"))) <= 1


def test_a_failure_leaves_the_old_output(tmp_path, inputs):
    (once,) = null(inputs, tmp_path / "out")
    before = pair(once.prefix)
    with open(inputs[0], "a") as file:
        file.write('{"text": "1 2 x"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 61, byte \d+: NullTokenizer"):
        null(inputs, tmp_path / "out", workers=2, shard_bytes=1000)
    assert pair(once.prefix) == before


def test_what_a_user_is_told(tmp_path, inputs):
    def refused(match, given, **options):
        with pytest.raises(ValueError, match=match):
            null(given, tmp_path / "out", **options)

    refused("--workers 0 must be at least 1", inputs, workers=0)
    refused("--input .*nothing.txt: cannot be read", [str(tmp_path / "nothing.txt")])
    (tmp_path / "a.csv").write_text("a,b")
    refused("a.csv: neither .txt nor .jsonl", [str(tmp_path / "a.csv")])
    refused("line 1, byte 0: no JSON object with a text 'body'", inputs, json_keys=["body"])
    (tmp_path / "empty.txt").write_text("")
    refused("no document with text in 1 file", [str(tmp_path / "empty.txt")])
    assert not list(tmp_path.glob("out_*"))


def command(*flags):
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        [sys.executable, "tools/preprocess_data.py", *map(str, flags)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_command(tmp_path, inputs):
    (once,) = null(inputs, tmp_path / "once")
    flags = ["--output-prefix", tmp_path / "out", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", 101, "--append-eod", "--workers", 2]
    done = command("--input", *inputs, *flags)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "")
    assert "out_text_document: 62 documents" in out and "tokens/s with 2 worker(s)" in out
    assert pair(tmp_path / "out_text_document") == pair(once.prefix)
    assert main(["--input", "nothing.txt", *map(str, flags)]) == 1


def test_a_write_that_fails_names_the_output(tmp_path, inputs, capsys):
    """As on a full disk: the system's error of a write names no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = ["--output-prefix", tmp_path / "out", "--tokenizer-type", "NullTokenizer"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        status = main(["--input", *inputs, *map(str, flags), "--vocab-size", "101"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = f"preprocess_data.py: --output-prefix {tmp_path / 'out'}: File too large"
    assert status == 1 and told in capsys.readouterr().err


def workers_of(process):
    """Return the process ids of the workers a command has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("workers", "stop", "status", "says"),
    sampled(
        [
            (
                2,
                "kill a worker",
                1,
                "a worker was killed (out of memory?); the same command continues",
            ),
            (1, "interrupt", 130, "interrupted; the same command continues from here"),
            (2, "interrupt", 130, "interrupted; the same command continues from here"),
            (2, "kill", -signal.SIGKILL, ""),
        ],
        4,
    ),
)
def test_a_stopped_run_keeps_what_is_complete(tmp_path, workers, stop, status, says):
    """Stop a run behind its first part, and let the same command finish it."""
    inputs = [tmp_path / f"{i:02}.txt" for i in range(30)]
    for path in inputs:
        path.write_text("1 " * 100_000)
    flags = ["--input", *inputs, "--output-prefix", tmp_path / "out", "--workers", workers]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 101]
    running = command(*flags)
    while not list(tmp_path.glob("out.*.parts/*.idx")):
        assert running.poll() is None
    if stop == "kill a worker":
        os.kill(int(workers_of(running)[0]), signal.SIGKILL)
    else:
        running.send_signal(signal.SIGINT if stop == "interrupt" else signal.SIGKILL)
    _, err = running.communicate(timeout=60)
    assert running.returncode == status and says in err
    assert err.count("\n") == 1 or stop == "kill"
    assert not list(tmp_path.glob("out_*"))
    again = command(*flags)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0 and "of 30 shards were complete already" in out, err
    assert "30 documents, 3,000,000 tokens" in out


def test_a_command_of_megatrons_tool(tmp_path, capsys):
    """GPT-2's two files by their flags, a .json of lines, and flags that change nothing here."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["low lower lowest"] * 9, 300, special_tokens=["<|endoftext|>"])
    model.save_model(str(tmp_path))
    merges = (tmp_path / "merges.txt").rename(tmp_path / "the-merges.txt")
    (tmp_path / "my.json").write_text(json.dumps({"text": "low lower"}) + "\n")
    files = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", merges]
    flags = ["--input", tmp_path / "my.json", "--output-prefix", tmp_path / "out", "--append-eod"]
    flags += ["--workers", 1, "--partitions", 1, "--log-interval", 9, "--dataset-impl", "mmap"]
    flags = [str(word) for word in [*flags, *files, "--keep-sequential-samples"]]
    assert main([*flags, "--tokenizer-type", "GPT2BPETokenizer"]) == 0
    read = IndexedTokens(str(tmp_path / "out_text_document")).tokens
    end = model.token_to_id("<|endoftext|>")
    assert read.tolist() == [*model.encode("low lower").ids, end]
    capsys.readouterr()
    assert main([*flags, "--tokenizer-type", "TikTokenizer"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("preprocess_data.py: --vocab-file: TikTokenizer does not use it")
    with pytest.raises(SystemExit):
        main([*flags, "--tokenizer-type", "PretrainedFromHF"])
    assert "of a Hugging Face folder give HuggingFaceTokenizer" in capsys.readouterr().err
