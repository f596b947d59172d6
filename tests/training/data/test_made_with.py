# SPDX-License-Identifier: Apache-2.0
"""A pair knows the tokenizer that made it: another one is refused wherever the pair is read."""

import json
import shutil
from pathlib import Path

import pytest

from tools.preprocess_data import preprocess
from training.data.build import build_datasets
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from training.data.tokenizer import Tokenizer, tokenizer_for
from training.flags.parse import parse

FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --device cpu --seq-length 4
    --lr 1e-3 --train-iters 2 --global-batch-size 1 --ffn-hidden-size 16"""
WORDS = [f"w{i}" for i in range(40)]
DAMAGE = [
    ("tokenizer_digest", 7, "tokenizer_digest: 7 is not str"),
    ("vocab_size", None, "vocab_size: None is not int"),
]


def folder_of(at: Path, *words: str, **config: str) -> Path:
    """Write the tokenizer of a Hugging Face folder, of some words and </s>."""
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    at.mkdir(exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(["</s>", "<eos>", *words])}
    model = Model(models.WordLevel(vocabulary, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    return at


def pair(at: Path, tokenizer: Path | int, end: bool = True) -> str:
    """Tokenize a few words by a folder's tokenizer, or numbers by that of no text."""
    text = at.with_suffix(".txt")
    words = WORDS if isinstance(tokenizer, Path) else [str(i) for i in range(40)]
    text.write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, 40, 10)))
    kind = ("NullTokenizer", None, tokenizer)
    if isinstance(tokenizer, Path):
        kind = ("HuggingFaceTokenizer", str(tokenizer), None)
    made = preprocess(
        [str(text)], str(at), *kind, append_eod=end, lines=True, report=lambda line: None
    )
    return made[0].prefix


def flags_of(tokenizer: Path | int, *more: str) -> list[str]:
    kind = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(tokenizer)]
    if isinstance(tokenizer, Path):
        kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return [*FLAGS.split(), *kind, *more]


def opened(tokenizer: Path | int, *more: str) -> list[str]:
    """Open a run's data; return the lines that it prints."""
    said: list[str] = []
    config = parse(flags_of(tokenizer, *more), 1)
    made: Tokenizer = tokenizer_for(config)
    build_datasets(config, made, said.append)
    return said


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "own", *WORDS)


def test_what_is_recorded(own, tmp_path):
    prefix = pair(tmp_path / "a", own)
    found = json.loads(Path(f"{prefix}.json").read_text())
    digest = tokenizer_for(parse(flags_of(own, "--mock-data"), 1)).digest()
    assert found.pop("lengths")
    assert found == {
        "format": "weft-tokens", "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_digest": digest, "vocab_size": 42, "eod": 0, "documents": 4, "tokens": 44,
    }  # fmt: skip
    pair(tmp_path / "a", own, end=False)  # replaces all three
    found = json.loads(Path(f"{prefix}.json").read_text())
    assert (found["eod"], found["tokens"]) == (None, 40)


def test_another_tokenizer_is_refused_wherever_a_pair_is_read(own, tmp_path):
    a, b = pair(tmp_path / "a", own), pair(tmp_path / "b", own, end=False)
    larger = folder_of(tmp_path / "larger", *WORDS, *(f"v{i}" for i in range(40)))
    c = pair(tmp_path / "c", larger)
    stages = tmp_path / "stages.json"
    both = [
        {"name": "one", "start_tokens": 0, "train_data_path": [a]},
        {"name": "two", "start_tokens": 4, "train_data_path": [c]},
    ]
    stages.write_text(json.dumps({"stages": both}))
    assert opened(own, "--data-path", "1", a, "2", b) == []
    for more in (
        ("--data-path", c),
        ("--data-path", "1", a, "1", c),
        ("--train-data-path", a, "--valid-data-path", c),
        ("--train-data-path", a, "--test-data-path", c),
        ("--train-data-path", a, "--valid-data-path", b, c, "--multiple-validation-sets"),
        ("--data-path", c, "--data-order", "megatron"),
        ("--data-stages", str(stages)),
    ):
        with pytest.raises(ValueError, match="made with .* of 82 tokens .*, and") as error:
            opened(own, *more)
        digest = json.loads(Path(f"{c}.json").read_text())["tokenizer_digest"]
        said = str(error.value)
        assert (
            said.startswith(f"{c}.json: tokenizer_digest: ")
            and f"82 tokens ({digest[:16]})" in said
        )
        assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {own} is" in said


def test_one_of_the_same_size_or_changed_in_place_is_refused(own, tmp_path):
    prefix = pair(tmp_path / "a", own)
    folder_of(own, *WORDS, chat_template="another", padding_side="left")  # it changes no token
    assert opened(own, "--data-path", prefix) == []
    for words, config in ((WORDS[::-1], {}), (WORDS, {"eos_token": "<eos>"})):
        folder_of(own, *words, **config)
        with pytest.raises(ValueError, match=f"{prefix}.json: tokenizer_digest: the pair"):
            opened(own, "--data-path", prefix)


def test_a_pair_is_moved_with_its_record_and_taken_without(own, tmp_path):
    prefix, moved = pair(tmp_path / "a", own), str(tmp_path / "elsewhere" / "b")
    second = pair(tmp_path / "c", own, end=False)
    Path(moved).parent.mkdir()
    for end in (".bin", ".idx", ".json"):
        shutil.copy(prefix + end, moved + end)
    assert opened(own, "--data-path", moved) == []
    other = folder_of(tmp_path / "other", *WORDS, "more")
    with pytest.raises(ValueError, match=f"{moved}.json: tokenizer_digest"):
        opened(other, "--data-path", moved)
    Path(f"{moved}.json").unlink()  # as Megatron's, and those of earlier versions
    named = f"taken as tokens of --tokenizer-type HuggingFaceTokenizer --tokenizer-model {other}"
    none = f"data: no {moved}.json says which tokenizer made the pair"
    assert opened(other, "--data-path", moved) == [f"{none}: {named}"]
    Path(f"{second}.json").unlink()
    assert opened(other, "--data-path", moved, second) == [f"{none} (and 1 more): {named}"]
    Path(f"{moved}.json").write_text('{"format": "of somebody else"}')
    assert "b.json was not written by tools/" in opened(other, "--data-path", moved)[0]


def test_a_record_of_other_tokens_says_nothing(own, tmp_path):
    """Another tool has written the pair since."""
    prefix = pair(tmp_path / "a", own)
    with IndexedWriter(prefix, token_dtype(42)) as writer:
        writer.add(range(30))
    other = folder_of(tmp_path / "other", *WORDS, "more")
    said = opened(other, "--data-path", prefix)
    assert len(said) == 1 and f"{prefix}.json describes other tokens than its .bin has" in said[0]


@pytest.mark.parametrize(("field", "value", "why"), DAMAGE)
def test_a_bad_record_is_named(own, tmp_path, field, value, why):
    path = Path(pair(tmp_path / "a", own) + ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ValueError, match=f"{path}: {why}"):
        opened(own, "--data-path", str(path)[:-5])


def test_numbers_take_the_ids_of_one_tokenizer(own, tmp_path):
    """NullTokenizer prints no bits a byte; the ends of documents must be those of the pair."""
    a, c = (
        pair(tmp_path / "a", own),
        pair(tmp_path / "c", folder_of(tmp_path / "other", *WORDS[:20])),
    )
    assert opened(42, "--data-path", a) == opened(99, "--data-path", a) == []
    with pytest.raises(ValueError, match=r"a_.*.json: vocab_size 42 is more than --vocab-size 41"):
        opened(41, "--data-path", a)
    with pytest.raises(ValueError, match="the pairs of a run must be made with one tokenizer"):
        opened(99, "--data-path", "1", a, "1", c)
    with pytest.raises(ValueError, match="eod 0 ends each document, and NullTokenizer expects 98"):
        opened(99, "--data-path", a, "--reset-attention-mask")
    numbers = pair(tmp_path / "n", 50)
    assert opened(50, "--data-path", numbers) == []
    for tokenizer in (99, own):
        with pytest.raises(ValueError, match="made with NullTokenizer of 50 tokens"):
            opened(tokenizer, "--data-path", numbers)


def test_only_a_record_is_replaced(own, tmp_path):
    prefix = pair(tmp_path / "a", own)
    before = Path(f"{prefix}.json").read_bytes()
    Path(f"{prefix}.json").unlink()
    pair(tmp_path / "a", own)
    assert Path(f"{prefix}.json").read_bytes() == before
    Path(f"{prefix}.json").write_text('{"my": "notes"}')
    with pytest.raises(ValueError, match=r"--output-prefix .*a_text_document.json: it exists and"):
        pair(tmp_path / "a", own)
    assert Path(f"{prefix}.json").read_text() == '{"my": "notes"}'
    assert len(IndexedTokens(prefix)) == 4 and not list(tmp_path.glob("*.parts"))
