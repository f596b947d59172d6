# SPDX-License-Identifier: Apache-2.0
"""Read a tokenizer.json of Hugging Face, and what is next to it about its special tokens."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from training.data.foreign_code import begin, calling, read_model
from training.data.token_texts import texts_of
from training.untrusted import parse_json

IDS = "ids:"  # how a digest begins that covers what changes token ids, and nothing else
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
MEANING = ("model", "normalizer", "pre_tokenizer", "added_tokens")  # parts of a tokenizer.json


class HuggingFaceTokenizer:
    """Read a tokenizer.json, or the one in a folder.

    bos and eod are what tokenizer_config.json next to it calls bos_token and eos_token, else
    special_tokens_map.json, else the first of BOS and EOD that it knows.
    """

    BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    EOD = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Model

        self.name = "HuggingFaceTokenizer"
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        self._bytes = read_model(path)
        with calling(f"--tokenizer-model {path} is not a tokenizer.json", mute=True):
            self._model = Model.from_buffer(self._bytes)
            self._model.no_truncation()  # a document is taken whole, and nothing is added to it
            self._model.no_padding()
            vocabulary = self._model.get_vocab(with_added_tokens=True)
            begun = self._model.encode("").ids[:1]
        self._config, config = self._in_same_folder(path, CONFIG)
        _, special = self._in_same_folder(path, SPECIAL)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

        def stated(key: str) -> object:
            value = config.get(key)
            return special.get(key) if value is None else value

        self.bos = self._special(stated("bos_token"), self.BOS)
        self.eod = self._special(stated("eos_token"), self.EOD)
        self.starts_with_bos = self.bos is not None and begun == [self.bos]

    def _in_same_folder(self, path: str, name: str) -> tuple[bytes, dict[str, Any]]:
        """Return a file next to tokenizer.json as it is and as an object, empty where it is not."""
        other, data = os.path.join(os.path.dirname(path), name), b"{}"
        if os.path.exists(other):
            data = read_model(other)
        found = parse_json(data, other, foreign=True)
        if not isinstance(found, dict):
            raise ValueError(f"{other} is not a JSON object")
        return data, found

    def _special(self, stated: object, custom: Sequence[str]) -> int | None:
        """Return the id of the stated token (text or {"content": text}), else of a usual one."""
        if isinstance(stated, dict):
            stated = stated.get("content")
        names = custom if stated is None else (str(stated),)
        ids = (self._model.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        with calling(self.name):
            return begin(self, bos) + self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens written out."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def texts(self) -> list[bytes]:
        """Return the bytes of text of each id."""
        return texts_of(self._model, self.vocab_size, self.bos, self.eod)

    def digest(self) -> str:
        """Return IDS and a SHA-256 of what changes a token id.

        That is the vocabulary, how a text is normalized and cut, and which ids begin and end a
        document. The chat template, the lengths for truncation and the spelling of the JSON are
        not part of it.
        """
        try:
            file = json.loads(self._bytes)
        except ValueError:  # the library reads it all the same
            return IDS + self.sha256()
        parts: dict[str, Any] = {name: file.get(name) for name in MEANING}
        model = parts["model"]
        if isinstance(model, dict) and isinstance(model.get("merges"), list):  # "a b" or ["a", "b"]
            pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
            parts["model"] = {**model, "merges": pairs}
        facts = [parts, self.bos, self.eod, self.starts_with_bos]
        return IDS + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def digest_before(self) -> str:
        """Return the SHA-256 of tokenizer.json and tokenizer_config.json, of older checkpoints."""
        return hashlib.sha256(self._bytes + self._config).hexdigest()

    def sha256(self) -> str:
        """Return the SHA-256 of tokenizer.json."""
        return hashlib.sha256(self._bytes).hexdigest()
