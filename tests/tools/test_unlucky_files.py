# SPDX-License-Identifier: Apache-2.0
"""Tools on files that are damaged, made by somebody else, or no files at all.

A case is a sound file, spoilt in a way that `rng` draws, or a pipe, a device or a folder in its
place. A tool refuses it in a sentence, in bounded time and memory, or takes it as what it says.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sampling import sampled
from tests.unlucky import Case, check, drawn
from training.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 1 << 32
HUGE = 1 << 40  # bytes of a file that has a size alone
ODD: list[Any] = [
    None, True, "x", "\x1b[2J", "", -1, 0, 1.5, 2**62, -(2**63), 1e300, [], {}, [[]], {"a": {}},
    ["x"] * 3, [1, 2, 3], [[1, 2, 3]],
]  # fmt: skip
TEXTS = [
    b"", b"\n", b"[", b"{}", b"[]", b"3", b"null", b'"x"', b"\xff\xfe\x00", b"\x00" * 99,
    b"[" * 99_999, b'{"a":' * 9999, b"9" * 5000, b"NaN", b"1e999", b'{"a": 1, "a": 2}',
    b'"\\ud800"', b'{"\x1b[2J": 1}', b"[" * 60 + b"]" * 60,
]  # fmt: skip


def changed(rng: random.Random, value: Any) -> Any:
    """Return a value with one part of it replaced or, in an object, lost."""
    if isinstance(value, dict) and value and rng.random() < 0.6:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def spoil(rng: random.Random, path: Path, whole: bool = False) -> None:
    """Spoil a file of JSON, or of a JSON value a line; or put something else in its place.

    whole: not what would still be JSON of the right kind.
    """
    data, way = path.read_bytes(), rng.randrange(5 * whole, 12)
    if way < 5:
        rows = [json.loads(line) for line in data.splitlines()]
        at = rng.randrange(len(rows))
        rows[at] = changed(rng, rows[at])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif way < 7:
        lines = [*data.splitlines(keepends=True), rng.choice(TEXTS) + b"\n"]
        path.write_bytes(lines[-1] if way == 5 or whole else b"".join(lines))
    elif way == 7:
        number = rng.choice([b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-" + b"8" * 19])
        path.write_bytes(re.sub(rb"(?<=[:,] )[\d.]+|$", number, data, count=1))
    elif way == 8:
        at = rng.randrange(len(data))
        path.write_bytes(
            data[:at] + rng.randbytes(rng.randrange(9)) + data[at + rng.randrange(9) :]
        )
    else:
        no_file(rng, path)


def no_file(rng: random.Random, path: Path) -> None:
    """Put a pipe, a device, a folder or a file that is too large in the place of a file."""
    path.unlink(missing_ok=True)
    way = rng.randrange(5)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to("/dev/zero")
    elif way == 2:
        path.mkdir()
    elif way == 3:
        path.symlink_to(path.name)
    else:
        path.touch()
        os.truncate(path, HUGE)


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def a_log(rng: random.Random, folder: Path) -> Case:
    rows = [
        {"iteration": i, "loss": 5.0 - i, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0,
         "step_seconds": 1.0,
         "consumed_tokens": 9 * i, "step_losses": [[i, 5.0 - i]]}
        for i in range(1, 4)
    ]  # fmt: skip
    path = lines(folder / "log.jsonl", [*rows, {"iteration": 3, "validation_loss": 2.5}])
    spoil(rng, path)
    axis = rng.choice(["iterations", "tokens", "time"])
    argv = ["tools/plot_loss.py", path, "--axis", axis, "--output", folder / "picture.svg"]
    argv += rng.choice([[], ["--panels", "lr", "grad-norm", "tokens-per-second"]])
    return Case(argv, (0, 1), "drawn: |plot_loss.py: .*log.jsonl", memory=MEMORY)


def a_cluster(rng: random.Random, folder: Path) -> Case:
    level = {"name": "x", "gpus": 0, "gbps_per_gpu": 200, "latency_us": 1, "oversubscription": 1}
    content = {"name": "x", "device": "h100", "nodes": 1, "gpus_per_node": 1, "levels": [level],
               "source": "made up for a test", "host_memory_gb": 9}  # fmt: skip
    if rng.random() < 0.3:
        del content["levels"], content["host_memory_gb"]
        content |= {"network_gbps_per_gpu": 200, "oversubscription": 1}
    path = lines(folder / "cluster.json", [content])
    spoil(rng, path)
    argv = ["tools/plan.py", "llama3-8b", path, "--global-batch-size", "8", "--nodes", "1"]
    return Case(argv, (0, 1, 2), "GPUs|plan.py: .*", memory=MEMORY)


def a_device(rng: random.Random, folder: Path) -> Case:
    path = folder / "device.json"
    shutil.copy(ROOT / "forecast/devices/h100.json", path)
    path.write_text(json.dumps(json.loads(path.read_text())) + "\n")
    spoil(rng, path)
    code = (
        "import sys\nfrom forecast.device_file import read_device\n"
        "from training.files.untrusted import sentence\n"
        "try:\n    print('read', read_device(sys.argv[1]).major)\n"
        "except (ValueError, OSError) as error:\n    sys.exit(sentence(error))\n"
    )
    return Case(["-c", code, path], (0, 1), "^read|device.json", memory=MEMORY)


def a_table(rng: random.Random, folder: Path) -> Case:
    path = folder / "runs.csv"
    head = "framework,gpu,n_gpus,seq,model,tp,pp,dp,mbs,gbs\n"
    row = "megatron,h100,8,2048,7B,1,1,8,1,8\n"
    path.write_text(head + row)
    cell = rng.choice(["9" * 5000, "NaN", "1e999", "\x1b[2J", "\x00", '"' + "a" * 200_000, "-1"])
    texts = [head + row.replace("2048", cell), head.replace("tp", cell) + row, row, "\x00" * 99]
    if rng.random() < 0.5:
        no_file(rng, path)
    else:
        path.write_bytes(rng.choice([*(text.encode() for text in texts), b"\xff\xfe", b""]))
    argv = ["benchmarks/plan_predict.py", path, "--out", folder / "out.csv"]
    return Case(argv, (0, 1, 2), r"rows predicted|plan_predict.py: .*runs.csv", memory=MEMORY)


def a_model_to_plan(rng: random.Random, folder: Path) -> Case:
    content = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
               "rope_theta": 1e4, "tie_word_embeddings": True, "num_local_experts": 4,
               "num_experts_per_tok": 2, "model_type": "mixtral"}  # fmt: skip
    path = lines(folder / "config.json", [content])
    spoil(rng, path)
    argv = ["tools/plan.py", path, "h100_8_nodes", "--nodes", "1", "--global-batch-size", "8"]
    return Case(argv, (0, 1, 2), "GPUs|plan.py: .*", memory=MEMORY)


RECORDS = [
    {"iteration": 10, "loss": 5.0, "lr": 1e-3, "tokens_per_second": 9.0},
    {"iteration": 10, "validation_loss": 5.0, "validation_bits_per_byte": 1.0},
]
QUICK = ["tools/quickstart.py", "--tp", "1", "--iters", "10", "--out"]


def quickstart(folder: Path) -> Path:
    """Write a run of make train whose next step would be the 11th; return its folder."""
    lines(folder / "out/corpus/corpus.json", [{"sha256": "a"}])
    lines(folder / "out/corpus/heldout.jsonl", [{"path": "a.py", "text": "def f"}])
    lines(folder / "out/tp1/log.jsonl", RECORDS)
    (folder / "out/tp1/checkpoints/step_00000010").mkdir(parents=True)
    (folder / "out/tp1/checkpoints/step_00000010/manifest.json").write_text("{}")
    return folder / "out"


def a_run_of_make_train(rng: random.Random, folder: Path) -> Case:
    """Nothing is trained: the tokens are missing."""
    out = quickstart(folder)
    name = rng.choice(["corpus/corpus.json", "tp1/log.jsonl", "tp1/run.json"])
    if name == "tp1/run.json":
        (out / name).write_text('{"key": "a"}')
    if rng.random() < 0.2:
        (out / "tp1/checkpoints/step_old").mkdir()
        (out / "tp1/checkpoints/step_old/manifest.json").touch()
    spoil(rng, out / name, whole=name != "tp1/log.jsonl")
    return Case([*QUICK, out], (1,), "make train: ", kept=[], memory=0)


def an_end_of_make_train(rng: random.Random, folder: Path) -> Case:
    """The log, the tokens and the text that the results are made of."""
    out = quickstart(folder)
    (out / "tokens/heldout").mkdir(parents=True)
    with IndexedWriter(str(out / "tokens/heldout/weft_text_document"), np.int32) as file:
        file.add([1, 2, (1 << 31) - 1])
    name = rng.choice(["tp1/log.jsonl", "corpus/heldout.jsonl"])
    spoil(rng, out / name)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tools import quickstart\n"
        "quickstart.train = lambda out, *more: Path(out) / 'tp1'\nquickstart.main()\n"
    )
    return Case(["-c", code, *QUICK[1:], out], (1,), "make train: ", memory=MEMORY)


def a_corpus_of_another_run(rng: random.Random, folder: Path) -> Case:
    """A run has learnt from a corpus, whose description is spoilt."""
    (folder / "text.txt").write_text("a line of text\n" * 99)
    build = ["tools/build_corpus.py", "--input", folder / "text.txt", "--output-dir"]
    about = lines(folder / "out/corpus/corpus.json", [{"sha256": "a", "texts": 1}])
    lines(folder / "out/tp1/run.json", [{"key": "a"}])
    spoil(rng, about)
    absent = [] if about.is_symlink() else [folder / "out/corpus/train.jsonl"]
    return Case([*build, folder / "out/corpus"], (0, 1), "corpus: |build_corpus.py: ",
                absent=absent, memory=MEMORY)  # fmt: skip


def a_source(rng: random.Random, folder: Path) -> Case:
    """What `make` compares times with."""
    (folder / "text.txt").write_text("a line of text\n" * 99)
    path = lines(folder / "source", [[[[1, 2]], ["text", None]]])
    spoil(rng, path, whole=True)
    argv = ["tools/build_corpus.py", "--input", folder / "text.txt", "--source", path]
    return Case(argv, (0, 1), "^$|build_corpus.py: .*source", memory=MEMORY)


def a_library(rng: random.Random, folder: Path) -> Case:
    """A folder of sources, some of which are none: they are left out."""
    (folder / "library").mkdir()
    for i in range(60):
        (folder / f"library/{i}.py").write_text(f"x = {i}\n" * 9)
    no_file(rng, folder / "library/0.py")
    (folder / "library/1.py").write_bytes(b"\xff\xfe")
    argv = ["tools/build_corpus.py", "--library", folder / "library", "--output-dir"]
    return Case([*argv, folder / "corpus"], (0,), "58 texts", memory=MEMORY)


LEDGER = (
    "tests/sample_ledger.py --steps 1 -- --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 "
    "--num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --device cpu"
).split()


def tokens_of(folder: Path) -> Path:
    with IndexedWriter(str(folder / "tokens"), np.uint16) as file:
        for _ in range(4):
            file.add(list(range(9)))
    return folder / "tokens"


def an_index(rng: random.Random, folder: Path) -> Case:
    prefix = tokens_of(folder)
    path = folder / rng.choice(["tokens.idx", "tokens.idx", "tokens.bin"])
    data = bytearray(path.read_bytes())
    way = rng.randrange(4)
    if way == 0:
        no_file(rng, path)
    elif way == 1 and path.suffix == ".idx":  # counts and lengths
        at = rng.choice([9, 17, 18, 26, 34, 38])
        data[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 7 + b"\x70", b"\xff" * 7 + b"\x7f"])
        path.write_bytes(data)
    elif way == 2:
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    data_flags = ["--vocab-size", "256", "--tokenizer-type", "NullTokenizer"]
    argv = [*LEDGER, *data_flags, "--train-data-path", prefix]
    return Case(argv, (0, 2), "^step 1 |ledger.py: .*tokens", memory=MEMORY)


def a_tokenizer(rng: random.Random, folder: Path) -> Case:
    vocabulary = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"<s>": 2, "</s>": 3}.items()
    added = [{"id": i, "content": name, **plain, "special": True} for name, i in special]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "a"}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
             "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
             "model": model}  # fmt: skip
    lines(folder / "tokenizer.json", [whole])
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "more": [1.5]}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        lines(folder / name, [named])
    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    spoil(rng, folder / name)
    (folder / "text.txt").write_text("abab\n\nbaba\n")
    argv = ["tools/preprocess_data.py", "--input", folder / "text.txt", "--output-prefix",
            folder / "tokens", "--tokenizer-type", "HuggingFaceTokenizer",
            "--tokenizer-model", folder, "--append-eod"]  # fmt: skip
    return Case(argv, (0, 1, 2), r"tokens|preprocess_data.py: ", memory=0)


def files_of_gpt2(rng: random.Random, folder: Path) -> Case:
    lines(folder / "vocab.json", [{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}])
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    spoil(rng, folder / "vocab.json") if rng.random() < 0.6 else no_file(rng, folder / "merges.txt")
    (folder / "text.txt").write_text("abab\n\nbaba\n")
    argv = ["tools/preprocess_data.py", "--input", folder / "text.txt", "--output-prefix",
            folder / "tokens", "--tokenizer-type", "GPT2BPETokenizer",
            "--vocab-file", folder / "vocab.json", "--append-eod"]  # fmt: skip
    return Case(argv, (0, 1, 2), r"tokens|preprocess_data.py: ", memory=0)


KINDS: dict[str, Callable[[random.Random, Path], Case]] = {
    kind.__name__: kind
    for kind in (
        a_log, a_cluster, a_device, a_table, a_model_to_plan,
        a_run_of_make_train, an_end_of_make_train, a_corpus_of_another_run, a_source, a_library,
        an_index, a_tokenizer, files_of_gpt2,
    )
}  # fmt: skip
CASES = drawn(KINDS, 60)


@pytest.mark.parametrize(("name", "seed"), sampled(CASES, 8))
def test_files_that_are_hostile_or_unlucky(launcher, tmp_path, name, seed):
    check(launcher, KINDS[name], seed, tmp_path)
