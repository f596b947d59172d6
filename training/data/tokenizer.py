# SPDX-License-Identifier: Apache-2.0
"""Turn text into token ids and back: one interface over the tokenizers of Llama models.

    --tokenizer-type           --tokenizer-model
    SentencePieceTokenizer     a SentencePiece .model
    GPTSentencePieceTokenizer  the same, another name
    Llama2Tokenizer            the same, another name
    TikTokenizer               Llama 3's tokenizer.model: lines of base64 token and rank
    HuggingFaceTokenizer       tokenizer.json, or a directory that holds one
    GPT2BPETokenizer           vocab.json, as --vocab-file; --merge-file is merges.txt beside it
    NullTokenizer              none: text is numbers below --vocab-size, the last of which
                               (--vocab-size - 1) ends a document

Ids are those of Megatron's preprocessing tool. Two have changed there: until Megatron Core 0.14
Llama2Tokenizer began each document with <s>, and until 0.17 NullTokenizer had one id more,
--vocab-size, which ended a document. Data of those times is read with --vocab-size one larger.

Tokenizers are read from local files only, and code that comes with a tokenizer is never run.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from training.data.gpt2_tokenizer import GPT2BPETokenizer

if TYPE_CHECKING:
    from training.config import Config


class Tokenizer(Protocol):
    """The interface of every tokenizer.

    `bos` and `eod` are ids or None; `starts_with_bos`: a training document begins with bos. Special
    tokens written out in a text are encoded as text, by HuggingFaceTokenizer as special tokens.
    """

    name: str
    vocab_size: int
    bos: int | None
    eod: int | None
    starts_with_bos: bool

    def encode(self, text: str, bos: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def digest(self) -> str: ...


class SentencePieceTokenizer:
    """Read a SentencePiece .model; `</s>` ends a document."""

    def __init__(self, path: str, name: str = "SentencePieceTokenizer") -> None:
        from sentencepiece import SentencePieceProcessor

        self.name = name
        self.starts_with_bos = False
        self._bytes = _read(path)
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(self._bytes)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {path} is not a SentencePiece model, which {name} needs"
            ) from error
        self.vocab_size = self._model.vocab_size()
        bos, eod = self._model.bos_id(), self._model.eos_id()
        self.bos = bos if bos >= 0 else None
        self.eod = eod if eod >= 0 else None

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        return _bos(self, bos) + self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens."""
        return self._model.decode([int(i) for i in ids])

    def digest(self) -> str:
        """Return the SHA-256 of the model file."""
        return hashlib.sha256(self._bytes).hexdigest()


class TikTokenizer:
    """Read Llama 3's tiktoken file; its 256 special tokens follow the ranks of the file."""

    PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    SPECIAL = (
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    )

    def __init__(self, path: str) -> None:
        from tiktoken import Encoding

        self.name = "TikTokenizer"
        self.starts_with_bos = False
        self._bytes = _read(path)
        ranks = _read_ranks(path, self._bytes)
        special = {token: len(ranks) + i for i, token in enumerate(self.SPECIAL)}
        self._model = Encoding(
            "llama3", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + len(special)
        self.bos: int | None = special["<|begin_of_text|>"]
        self.eod: int | None = special["<|end_of_text|>"]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        ids = _bos(self, bos)
        for piece in _bounded_pieces(text):
            ids.extend(self._model.encode_ordinary(piece))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens written out."""
        return self._model.decode([int(i) for i in ids])

    def digest(self) -> str:
        """Return the SHA-256 of the rank file."""
        return hashlib.sha256(self._bytes).hexdigest()


class HuggingFaceTokenizer:
    """Read a tokenizer.json; tokenizer_config.json beside it may name bos and eod."""

    BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    EOD = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Model

        self.name = "HuggingFaceTokenizer"
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        self._bytes = _read(path)
        try:
            self._model = Model.from_buffer(self._bytes)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(
                f"--tokenizer-model {path} is not a tokenizer.json: {error}"
            ) from error
        self._config = b"{}"
        beside = os.path.join(os.path.dirname(path), "tokenizer_config.json")
        if os.path.exists(beside):
            self._config = _read(beside)
        try:
            config = dict(json.loads(self._config))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{beside} is not a JSON object: {error}") from error
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos = self._special(config.get("bos_token"), self.BOS)
        self.eod = self._special(config.get("eos_token"), self.EOD)
        begun = self._model.encode("").ids[:1]
        self.starts_with_bos = self.bos is not None and begun == [self.bos]

    def _special(self, stated: object, custom: Sequence[str]) -> int | None:
        """Return the id of the stated token (text or {"content": text}), else of a usual one."""
        if isinstance(stated, dict):
            stated = stated.get("content")
        names = custom if stated is None else (str(stated),)
        ids = (self._model.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        return _bos(self, bos) + self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens written out."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def digest(self) -> str:
        """Return the SHA-256 of tokenizer.json and tokenizer_config.json."""
        return hashlib.sha256(self._bytes + self._config).hexdigest()


class NullTokenizer:
    """Read numbers as ids 0 to vocab_size - 1; the last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.name = "NullTokenizer"
        self.starts_with_bos = False
        self.vocab_size = vocab_size
        self.bos: int | None = None
        self.eod: int | None = vocab_size - 1

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the numbers of a text, separated there by white space, after bos if asked for."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise ValueError(
                    f"NullTokenizer reads numbers below {self.vocab_size}, not {word[:40]!r}"
                )
        return _bos(self, bos) + [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)

    def digest(self) -> str:
        """Return a SHA-256 of the vocabulary size."""
        return hashlib.sha256(f"{self.name} {self.vocab_size}".encode()).hexdigest()


TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
)


def tokenizer_for(config: "Config") -> Tokenizer:
    """Return the tokenizer that a run's flags ask for. Raises ValueError."""
    data = config.data
    return build_tokenizer(
        data.tokenizer_type, data.tokenizer_model, config.model.vocab_size, data.merge_file
    )


def build_tokenizer(
    tokenizer_type: str | None,
    tokenizer_model: str | None,
    vocab_size: int | None,
    merge_file: str | None = None,
) -> Tokenizer:
    """Return the tokenizer that the flags of these names ask for. Raises ValueError."""
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}"
        )
    if tokenizer_type == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size, at least 1")
        return NullTokenizer(vocab_size)
    if not tokenizer_model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(tokenizer_model)
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(tokenizer_model, merge_file)
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(tokenizer_model)
    return SentencePieceTokenizer(tokenizer_model, tokenizer_type)


def _bos(tokenizer: Tokenizer, wanted: bool) -> list[int]:
    if not wanted:
        return []
    if tokenizer.bos is None:
        raise ValueError(f"this {tokenizer.name} has no beginning-of-text token")
    return [tokenizer.bos]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"--tokenizer-model {path} cannot be read: {error.strerror}") from error


def _read_ranks(path: str, raw: bytes) -> dict[bytes, int]:
    """Return {token: rank} of lines of base64 token and rank; ranks count from 0 without a gap."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"--tokenizer-model {path}, line {number}: a tiktoken file has a base64 token and "
                "its rank on each line"
            ) from error
        if int(rank) != number - 1 or len(ranks) != number:
            raise ValueError(
                f"--tokenizer-model {path}, line {number}: rank {int(rank)} is out of order or its "
                "token is there twice"
            )
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"--tokenizer-model {path}: not every single byte has a rank")
    return ranks


def _bounded_pieces(text: str, size: int = 400_000, run: int = 25_000) -> Iterator[str]:
    """Yield pieces of at most `size` characters, with runs of (non-)space of at most `run`.

    Llama 3's own tokenizer cuts there too: the regular expression engine fails on longer ones.
    """
    for first in range(0, len(text), size):
        part = text[first : first + size]
        begin = 0
        for match in re.finditer(r"\s{1000,}|\S{1000,}", part):  # shorter ones need no cut
            for end in range(match.start() + run, match.end(), run):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def tokenizer_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the tokenizer flags for a directory's files, type and file name, or {}.

    files: {name: contents, or how they begin}. Llama 3's tokenizer.model is lines of base64 and
    rank, Llama 2's a SentencePiece protobuf.
    """
    if "tokenizer.json" in files:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer.json"}
    if "tokenizer.model" not in files:
        return {}
    tiktoken = re.match(rb"[A-Za-z0-9+/]+=* 0\r?\n", files["tokenizer.model"]) is not None
    kind = "TikTokenizer" if tiktoken else "Llama2Tokenizer"
    return {"tokenizer_type": kind, "tokenizer_model": "tokenizer.model"}
