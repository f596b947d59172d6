# SPDX-License-Identifier: Apache-2.0
"""Turn text into token ids and back: one interface over the tokenizers of Llama models.

    --tokenizer-type           --tokenizer-model
    SentencePieceTokenizer     a SentencePiece .model
    GPTSentencePieceTokenizer  the same, another name
    Llama2Tokenizer            the same, another name
    TikTokenizer               Llama 3's tokenizer.model: lines of base64 token and rank
    HuggingFaceTokenizer       tokenizer.json, or a directory with one, with transformers' ids
    GPT2BPETokenizer           vocab.json, as --vocab-file; --merge-file is merges.txt next to it
    NullTokenizer              none: text is numbers below --vocab-size, the last of which
                               (--vocab-size - 1) ends a document

Ids are those of Megatron's preprocessing tool. Two tokenizers have changed there: until Megatron
Core 0.14 Llama2Tokenizer began each document with <s>, and until 0.17 NullTokenizer had one id
more, --vocab-size, which ended a document. Read such data with --vocab-size one larger.

Tokenizers are read from local files only, and code that comes with a tokenizer is never run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from training.data.foreign_code import begin, calling, read_model
from training.data.gpt2_tokenizer import GPT2BPETokenizer
from training.data.hf_tokenizer import HuggingFaceTokenizer
from training.data.tik_tokenizer import TikTokenizer, is_ranks
from training.data.token_texts import SPACE

if TYPE_CHECKING:
    from training.settings.config import Config

MOST_IDS = (1 << 31) - 1  # tokens are int32 at most


class Tokenizer(Protocol):
    """The interface of every tokenizer.

    `bos` and `eod` are ids or None; `starts_with_bos`: a training document begins with bos. Special
    tokens written out in a text are encoded as text, by HuggingFaceTokenizer as special tokens.
    `texts` returns the bytes of text of each id, perhaps a part of a character; special and unknown
    tokens have none.
    """

    name: str
    vocab_size: int
    bos: int | None
    eod: int | None
    starts_with_bos: bool

    def encode(self, text: str, bos: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def texts(self) -> list[bytes]: ...

    def digest(self) -> str: ...

    def __hash__(self) -> int: ...


class SentencePieceTokenizer:
    """Read a SentencePiece .model; `</s>` ends a document."""

    def __init__(self, path: str, name: str = "SentencePieceTokenizer") -> None:
        from sentencepiece import SentencePieceProcessor

        self.name = name
        self.starts_with_bos = False
        self._bytes = read_model(path)
        self._model = SentencePieceProcessor()
        why = f"--tokenizer-model {path} is not a SentencePiece model, which {name} needs"
        with calling(why, mute=True):
            if not self._bytes:
                raise ValueError("it is empty")
            self._model.LoadFromSerializedProto(self._bytes)
        self.vocab_size = self._model.vocab_size()
        bos, eod = self._model.bos_id(), self._model.eos_id()
        self.bos = bos if bos >= 0 else None
        self.eod = eod if eod >= 0 else None

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        with calling(self.name):
            return begin(self, bos) + self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens and the vocabulary's padding."""
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])

    def texts(self) -> list[bytes]:
        """Return the bytes of text of each id; a piece writes a space as SPACE."""
        model, ids = self._model, list(range(self.vocab_size))
        none = (model.is_control(ids), model.is_unknown(ids), model.is_unused(ids))
        pieces = zip(model.id_to_piece(ids), model.is_byte(ids), *none, strict=True)
        return [
            b""
            if any(silent)
            else bytes.fromhex(piece[3:5])
            if byte
            else piece.replace(SPACE, " ").encode()
            for piece, byte, *silent in pieces
        ]

    def digest(self) -> str:
        """Return the SHA-256 of the model file."""
        return hashlib.sha256(self._bytes).hexdigest()


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
            short = len(word) < 20 and word.isascii() and word.isdigit()
            if not (short and int(word) < self.vocab_size):
                raise ValueError(
                    f"NullTokenizer reads numbers below {self.vocab_size}, not {word[:40]!r}"
                )
        return begin(self, bos) + [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)

    def texts(self) -> list[bytes]:
        """Return no bytes for any id: a number has no text."""
        return [b""] * self.vocab_size

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
OTHER_TYPE = (
    "for the tokenizer of a Hugging Face folder give HuggingFaceTokenizer and "
    "--tokenizer-model FOLDER"
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
        if not vocab_size or not 1 <= vocab_size <= MOST_IDS:
            raise ValueError(
                f"--tokenizer-type NullTokenizer needs --vocab-size, from 1 to {MOST_IDS}"
            )
        return NullTokenizer(vocab_size)
    if not tokenizer_model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    made: Tokenizer
    if tokenizer_type == "TikTokenizer":
        made = TikTokenizer(tokenizer_model)
    elif tokenizer_type == "GPT2BPETokenizer":
        made = GPT2BPETokenizer(tokenizer_model, merge_file)
    elif tokenizer_type == "HuggingFaceTokenizer":
        made = HuggingFaceTokenizer(tokenizer_model)
    else:
        made = SentencePieceTokenizer(tokenizer_model, tokenizer_type)
    if not 1 <= made.vocab_size <= MOST_IDS:
        raise ValueError(
            f"{tokenizer_type} {tokenizer_model}: its ids go up to {made.vocab_size - 1}, and they "
            f"must lie between 0 and {MOST_IDS - 1}"
        )
    return made


def tokenizer_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the tokenizer flags for a directory's files, type and file name, or {}.

    files: {name: contents, or how they begin}. Llama 3's tokenizer.model is lines of base64 and
    rank, Llama 2's a SentencePiece protobuf.
    """
    if "tokenizer.json" in files:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer.json"}
    if "tokenizer.model" not in files:
        return {}
    kind = "TikTokenizer" if is_ranks(files["tokenizer.model"]) else "Llama2Tokenizer"
    return {"tokenizer_type": kind, "tokenizer_model": "tokenizer.model"}
