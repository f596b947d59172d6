# SPDX-License-Identifier: Apache-2.0
"""Read GPT-2's byte-level BPE from its two files, vocab.json and merges.txt."""

import hashlib
import os
from collections.abc import Sequence

from training.data.foreign_code import calling, read_model
from training.data.token_texts import texts_of


class GPT2BPETokenizer:
    """GPT-2's tokenizer, with the ids of transformers; <|endoftext|> ends a document."""

    EOD = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str | None = None) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        self.name = "GPT2BPETokenizer"
        self.starts_with_bos = False
        merge_file = merge_file or os.path.join(os.path.dirname(vocab_file), "merges.txt")
        self._bytes = b""
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            self._bytes += read_model(path, flag)
        what = (
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are not GPT-2's vocab.json "
            "and merges.txt"
        )
        with calling(what, mute=True):
            self._model = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = decoders.ByteLevel()
        vocabulary = self._model.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos: int | None = None
        self.eod: int | None = vocabulary.get(self.EOD)
        if self.eod is None:
            raise ValueError(f"--vocab-file {vocab_file} has no {self.EOD}, which ends a document")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text."""
        if bos:
            raise ValueError(f"{self.name} has no beginning-of-text token")
        with calling(self.name):
            return self._model.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including <|endoftext|>."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def texts(self) -> list[bytes]:
        """Return the bytes of text of each id."""
        return texts_of(self._model, self.vocab_size, self.bos, self.eod)

    def digest(self) -> str:
        """Return the SHA-256 of both files."""
        return hashlib.sha256(self._bytes).hexdigest()
