# SPDX-License-Identifier: Apache-2.0
"""Read Llama 3's tokenizer.model, lines of base64 token and rank."""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence

from training.data.foreign_code import begin, calling, read_model

LLAMA3 = 128_000  # ranks in Llama 3's file


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
        self._bytes = read_model(path)
        ranks = _read_ranks(path, self._bytes)
        special = {token: len(ranks) + i for i, token in enumerate(self.SPECIAL)}
        with calling(f"--tokenizer-model {path}", mute=True):
            self._model = Encoding(
                "llama3", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special
            )
        self.vocab_size = len(ranks) + len(special)
        self.bos: int | None = special["<|begin_of_text|>"]
        self.eod: int | None = special["<|end_of_text|>"]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        ids = begin(self, bos)
        for piece in _bounded_pieces(text):
            with calling(self.name):
                ids.extend(self._model.encode_ordinary(piece))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens and without the vocabulary's padding."""
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])

    def texts(self) -> list[bytes]:
        """Return the bytes of each rank, and none of the special tokens."""
        ranks = self.vocab_size - len(self.SPECIAL)
        own = [self._model.decode_single_token_bytes(i) for i in range(ranks)]
        return own + [b""] * len(self.SPECIAL)

    def digest(self) -> str:
        """Return the SHA-256 of the rank file."""
        return hashlib.sha256(self._bytes).hexdigest()


def is_ranks(head: bytes) -> bool:
    """Return whether the beginning of a file has the form of base64 tokens and ranks."""
    return re.match(rb"[A-Za-z0-9+/]+=* 0\r?\n", head) is not None


def _read_ranks(path: str, raw: bytes) -> dict[bytes, int]:
    """Return {token: rank} of lines of base64 token and rank; ranks count from 0 without a gap."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank[:20])
        except ValueError as error:
            raise ValueError(
                f"--tokenizer-model {path}, line {number}: a tiktoken file has a base64 token and "
                "its rank on each line"
            ) from error
        if int(rank[:20]) != number - 1 or len(ranks) != number:
            raise ValueError(
                f"--tokenizer-model {path}, line {number}: rank {int(rank[:20])} is out of order "
                "or its token is there twice"
            )
    if len(ranks) > LLAMA3:
        raise ValueError(
            f"--tokenizer-model {path}: it has {len(ranks):,} ranks, more than the {LLAMA3:,} of "
            "Llama 3, and other models (Llama 4, Qwen) cut texts by rules of their own, which are "
            "not available for tiktoken files; HuggingFaceTokenizer reads their tokenizer.json"
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
