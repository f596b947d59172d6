# SPDX-License-Identifier: Apache-2.0
"""The bytes of text behind tokens add up to the size of the files that the tokens are of."""

import base64
import io
import os
from pathlib import Path

import numpy as np
import pytest

from tools.preprocess_data import preprocess
from training.data.batch import PAD, DocumentRules
from training.data.bytes_per_token import TextBytes
from training.data.cache import IndexCache
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from training.data.loader import Loader
from training.data.one_pass import OnePass
from training.data.tokenizer import build_tokenizer

LEARNT = ["one two three, and one more\n", "two  three x 1 2 3\tone's", "three!\r\n"] * 20
TEXTS = [  # what the tokenizers have not learnt; the second begins with a space
    "one two 中文字 three 日本語\r\n\r\n two\0three",
    "  two spaces, \t and a tab 😀👩‍💻 é é ﬁ ① Ａ\n",
    "\n\none\n",
    "ünïcödé ΑΒΓ абв ไทย \u2028\x7f\ufeff" * 40,
    "x",
]
SPECIAL = ["<|endoftext|>", "<|begin|>"]


def gpt2(folder: Path) -> tuple[str, str]:
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer()
    model.train_from_iterator(LEARNT, 280, special_tokens=SPECIAL, show_progress=False)
    model.save_model(str(folder))
    return "GPT2BPETokenizer", str(folder / "vocab.json")


def byte_level(folder: Path) -> tuple[str, str]:
    """As Llama 3's: byte-level, begun by <|begin|>, with a token of text added."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer, processors

    model = ByteLevelBPETokenizer()
    model.train_from_iterator(LEARNT, 280, special_tokens=SPECIAL, show_progress=False)
    model.add_tokens([AddedToken("日本語", normalized=False)])
    begun = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", 1)])
    model._tokenizer.post_processor = begun
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>"}')
    return "HuggingFaceTokenizer", str(folder)


def sentencepiece(folder: Path, vocab_size=310, texts=LEARNT, **options) -> tuple[str, str]:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=vocab_size, minloglevel=2,
        hard_vocab_limit=False, normalization_rule_name="identity", model_type="bpe",
        **{"byte_fallback": True, "remove_extra_whitespaces": False, **options},
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return "Llama2Tokenizer", str(folder / "tokenizer.model")


def without_spaces(folder: Path) -> tuple[str, str]:
    """With no piece of a space, which then is three bytes of its own (parameter-golf#897)."""
    return sentencepiece(folder, 280, ["onetwothree\n"] * 20, add_dummy_prefix=False)


def without_prefix(folder: Path) -> tuple[str, str]:
    return sentencepiece(folder, add_dummy_prefix=False, user_defined_symbols=["\n", "three"])


def byte_fallback(folder: Path, **parts) -> tuple[str, str]:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    fallback = (f"<0x{i:02X}>" for i in range(256))
    pieces = ["<unk>", "<s>", "</s>", *fallback, *"▁onetwhrxad", "on", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(vocabulary, [("o", "n"), ("▁", "▁")], **options))
    for name, part in parts.items():
        setattr(made, name, part)
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    return "HuggingFaceTokenizer", str(folder / "tokenizer.json")


def llama2(folder: Path) -> tuple[str, str]:
    """As transformers 4 converts Llama 2's: a space in front, byte fallback."""
    from tokenizers import normalizers

    front, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    return byte_fallback(folder, normalizer=normalizers.Sequence([front, spaces]))


def metaspace(folder: Path) -> tuple[str, str]:
    """As transformers 5 does: a text that begins with a space gets none in front."""
    from tokenizers import pre_tokenizers

    return byte_fallback(folder, pre_tokenizer=pre_tokenizers.Metaspace("▁", "first", split=False))


def gemma(folder: Path) -> tuple[str, str]:
    """Gemma's lists of spaces are pieces, and added tokens too."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    kind, path = byte_fallback(folder, normalizer=normalizers.Replace(" ", "▁"))
    made = Tokenizer.from_file(path)
    made.add_tokens([AddedToken("▁▁", normalized=False)])
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(text)
    made.save(path)
    return kind, path


def tiktoken(folder: Path) -> tuple[str, str]:
    ranks = [*(bytes([i]) for i in range(256)), b"on", b" t", "中".encode()[:2], b"one"]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(ranks)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return "TikTokenizer", str(folder / "tokenizer.model")


PIECES = [sentencepiece, without_prefix, without_spaces, llama2, metaspace, gemma]
EXACT = [gpt2, byte_level, *PIECES, tiktoken]


def labels_of(tokens: IndexedTokens, length: int) -> OnePass:
    """Return samples in which each token but the first is a label once."""
    return OnePass([GPTDataset(tokens, "valid", range(len(tokens)), length, 1, IndexCache(""))])


def counted(data: OnePass, text: TextBytes, rules: DocumentRules) -> int:
    """Return the bytes of all labels, counted by a loader in batches of two rows."""
    loader = Loader(data, 2, 0, 1, vocab_size=1 << 20, rules=rules, text=text)
    return sum(batch.text_bytes for group in loader.global_batches(0, 4) for batch in group)


@pytest.mark.parametrize("made", EXACT, ids=lambda made: made.__name__)
def test_the_counts_are_the_size_of_the_files(made, tmp_path):
    kind, model = made(tmp_path)
    files = [tmp_path / f"{i}.txt" for i in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_bytes((text.lstrip(" ") if made is metaspace else text).encode())
    [pair] = preprocess(
        list(map(str, files)), str(tmp_path / "out"), kind, model,
        append_eod=True, report=lambda line: None,
    )  # fmt: skip
    tokenizer, said = build_tokenizer(kind, model, None), []
    with IndexedWriter(str(tmp_path / "all"), token_dtype(tokenizer.vocab_size)) as writer:
        writer.add([tokenizer.eod])  # the first token is no label
        writer.add_file(pair.prefix)
    text, tokens = TextBytes(tokenizer, said.append), IndexedTokens(str(tmp_path / "all"))
    size = sum(os.path.getsize(file) for file in files)
    for length in (7, 24, 256):  # characters are cut
        assert counted(labels_of(tokens, length), text, DocumentRules()) == size, length
    assert not said


def wordpiece(folder: Path) -> tuple[str, str]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = ["[UNK]", "one", "##s", "two", "</s>"]
    made = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return "HuggingFaceTokenizer", str(folder / "tokenizer.json")


def unigram(folder: Path) -> tuple[str, str]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "▁", "one", "s", "two", "</s>"]
    made = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return "HuggingFaceTokenizer", str(folder / "tokenizer.json")


def words_alone(folder: Path) -> tuple[str, str]:
    """It refuses a text of any other word."""
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"ones two\N{SNOWMAN} two": 0, "</s>": 1}, "[UNK]"))
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return "HuggingFaceTokenizer", str(folder / "tokenizer.json")


def few_pieces(folder: Path) -> tuple[str, str]:
    return sentencepiece(folder, 40, byte_fallback=False)


UNLIKE = [wordpiece, unigram, words_alone, few_pieces]


@pytest.mark.parametrize("made", UNLIKE, ids=lambda made: made.__name__)
def test_what_is_unknown_counts_none_and_a_line_says_so(made, tmp_path):
    tokenizer, said = build_tokenizer(*made(tmp_path), None), []
    text = TextBytes(tokenizer, said.append)
    rows = np.array([[tokenizer.eod, *tokenizer.encode("ones two\N{SNOWMAN} two"), tokenizer.eod]])
    known = {words_alone: "ones two\N{SNOWMAN} two"}.get(made, "ones two two")
    assert text.count(rows, DocumentRules()) == len(known.encode())
    assert len(said) == 1 and f"not be all of the text: {tokenizer.name} turns" in said[0]


class Letters:
    name, bos, eod, vocab_size = "x", 8, 9, 10

    def encode(self, text):
        return []

    def texts(self):
        return [b"a", b"\xc3\xa9", "\N{SNOWMAN}".encode()] + [b""] * 7


def test_labels_without_a_loss_count_none():
    """The labels are é, snowman, eod, a, snowman: of 2, 3, 0, 1 and 3 bytes; then padding."""
    row = np.array([[0, 1, 2, 9, 0, 2, PAD, PAD]])
    text = TextBytes(Letters(), lambda line: None)
    assert text.count(row, DocumentRules(9)) == 9
    assert text.count(row, DocumentRules(9, eod_mask_loss=True)) == 8
    assert text.count(np.full((2, 4), PAD), DocumentRules(9)) == 0
