# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face tokenizer.json, and the files next to it that define special tokens."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from training.data.foreign_code import begin, calling, read_model
from training.data.hf_classes import (
    BUILT,
    DECODER,
    OPTIONS,
    Notes,
    add_tokens,
    built,
    class_of,
    content,
    cuts,
    stated,
)
from training.data.tik_tokenizer import LLAMA3, is_ranks
from training.data.token_texts import texts_of
from training.files.untrusted import parse_json

IDS = "ids:"  # prefix of a digest that covers everything that determines ids, and nothing else
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
ADDED, MODEL = "added_tokens.json", "config.json"


class HuggingFaceTokenizer:
    """Read a tokenizer.json, or the one in a folder, and the files next to it.

    The ids are those of transformers.AutoTokenizer (version 5). bos and eod are its bos_token and
    eos_token; if no file names one, it is the special token with one of the names in BOS or EOD,
    provided that there is exactly one.
    """

    BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    EOD = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Model

        self.name = "HuggingFaceTokenizer"
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        if not os.path.lexists(path) and (others := _others(os.path.dirname(path))):
            raise ValueError(f"--tokenizer-model: there is no {path}, but {others}")
        self._bytes = read_model(path)
        with calling(f"--tokenizer-model {path} is not a tokenizer.json", mute=True):
            raw = Model.from_buffer(self._bytes)
            padding = raw.padding
            raw.no_truncation()  # a document is taken whole, and nothing is added to it
            raw.no_padding()
            begun: Sequence[int | None] = raw.encode("").ids[:1]
        files = [self._in_same_folder(path, name) for name in (CONFIG, SPECIAL, ADDED, MODEL)]
        paths, (self._config, *_), (config, special, added, model) = zip(*files, strict=True)
        kind = class_of(config, model, b'"ByteLevel"' in self._bytes, paths[0])
        before = cuts(raw)
        self._model: Model = raw
        if kind:
            older = {} if config.get(DECODER) is not None else special
            unk = older.get("unk_token") or config.get("unk_token", "")
            self._model = built(raw, kind, config, unk, paths[0], model.get("model_type"))
        if dropout := getattr(self._model.model, "dropout", None):
            raise ValueError(
                f"{path}: its BPE has dropout {dropout:.3g}, which tokenizes a text differently "
                "each time: set dropout to null"
            )
        notes = Notes(config, special, added, self._listed(), padding, paths[:3])
        with calling(f"--tokenizer-model {path}", mute=True):
            named = add_tokens(self._model, kind, notes)
            vocabulary = self._model.get_vocab(with_added_tokens=True)
        have = self._model.get_added_tokens_decoder()
        self._cuts = cuts(self._model)
        self._as_file = self._cuts == before  # tokenizer.json alone gives the same ids
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special_texts = [token.content for token in have.values() if token.special]

        def token_id(key: str, usual: Sequence[str]) -> int | None:
            texts = [named[key]] if key in named else [t for t in usual if t in special_texts]
            return self._model.token_to_id(texts[0]) if len(texts) == 1 else None

        self.bos, self.eod = token_id("bos_token", self.BOS), token_id("eos_token", self.EOD)
        if kind and (starts := BUILT[kind].starts) is not None:
            begun = [self._model.token_to_id(named.get(starts, ""))]
        self.starts_with_bos = self.bos is not None and begun == [self.bos]
        # bos as in earlier versions, which also took a token that is not special
        first = content(config.get("bos_token") or special.get("bos_token"))
        ids = (raw.token_to_id(text) for text in ([first] if first is not None else self.BOS))
        self._bos = next((i for i in ids if i is not None), None)

    def _in_same_folder(self, path: str, name: str) -> tuple[str, bytes, dict[str, Any]]:
        """Return the path, bytes and object of a file next to tokenizer.json, {} without it."""
        other, data = os.path.join(os.path.dirname(path), name), b"{}"
        if os.path.exists(other):
            data = read_model(other)
        found = parse_json(data, other, foreign=True)
        if not isinstance(found, dict):
            raise ValueError(f"{other} is not a JSON object")
        return other, data, found

    def _parsed(self) -> dict[str, Any]:
        """Return the object in tokenizer.json, {} if only the library can parse it."""
        try:
            found: dict[str, Any] = json.loads(self._bytes)
        except ValueError:
            return {}
        return found

    def _listed(self) -> list[dict[str, Any]]:
        """Return the file's added_tokens, without parsing its vocabulary, which takes long."""
        at = re.search(rb'"added_tokens"\s*:\s*(?=\[)', self._bytes)
        try:
            text = self._bytes[at.end() :].decode() if at else "[]"
            listed: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]
        except ValueError:
            return []  # only the library can parse it
        return listed

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text, after bos if asked for."""
        with calling(self.name):
            return begin(self, bos) + self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def texts(self) -> list[bytes]:
        """Return the bytes of text of each id."""
        return texts_of(self._model, self.vocab_size, self.bos, self.eod)

    def digest(self) -> str:
        """Return IDS and a SHA-256 of everything that determines token ids.

        That is the vocabulary, how a text is normalized and cut, and which ids begin and end a
        document, all in their effective form: a folder that transformers saved again has the same
        digest if it gives the same ids. The chat template, the lengths for truncation and the
        spelling of the JSON are not part of it.
        """
        return self.digests()[0]

    def digests(self) -> list[str]:
        """Return `digest`, and those of earlier versions if they would give the same ids.

        Earlier versions read tokenizer.json alone, and their digests depend on its spelling; the
        oldest also depends on all of tokenizer_config.json.
        """
        file = self._parsed()
        older = hashlib.sha256(self._bytes + self._config).hexdigest()
        if not file:
            return [IDS + self.sha256(), *[older] * self._as_file]
        model = dict(file.get("model") or {})
        if isinstance(model.get("merges"), list):  # "a b" or ["a", "b"]
            model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        texts = {key: json.dumps(model[key], sort_keys=True) for key in sorted(model)}
        rest = {key: model[key] for key in model.keys() - {*OPTIONS, "type", "vocab", "merges"}}
        facts = [type(self._model.model).__name__, stated(rest), self._cuts]
        facts += [self.bos if self.starts_with_bos else None, self.eod]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for key in ("vocab", "merges"):
            digest.update(texts.get(key, "").encode())
        found = [IDS + digest.hexdigest()]
        if self._as_file:
            fields = ("added_tokens", "model", "normalizer", "pre_tokenizer")
            parts = {key: None if key == "model" else file.get(key) for key in fields}
            before = json.dumps([parts, self._bos, self.eod, self.starts_with_bos], sort_keys=True)
            whole = ", ".join(f"{json.dumps(key)}: {text}" for key, text in texts.items())
            before = before.replace('"model": null', f'"model": {{{whole}}}', 1)
            found += [IDS + hashlib.sha256(before.encode()).hexdigest(), older]
        return found

    def sha256(self) -> str:
        """Return the SHA-256 of tokenizer.json."""
        return hashlib.sha256(self._bytes).hexdigest()


def _others(folder: str) -> str:
    """Return the other tokenizer files in a folder and the flags that read them, "" if none."""
    there = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    pair = ("vocab.json", "merges.txt")
    kinds = (*pair, "vocab.txt", "tekken.json")
    found = [name for name in there if name in kinds or name.endswith((".model", ".tiktoken"))]
    if not found:
        return ""
    ways, less = [], f", but no token of {ADDED}" if ADDED in there else ""
    for name in (name for name in found if name.endswith(".model")):
        path = os.path.join(folder, name)
        data = read_model(path)
        if (tik := is_ranks(data[:1000])) and data.count(b"\n") > LLAMA3:
            continue  # another model's
        kind = "TikTokenizer" if tik else "SentencePieceTokenizer"
        ways.append(f"--tokenizer-type {kind} --tokenizer-model {path} reads it{less}")
    if all(name in found for name in pair):
        vocabulary, merges = (os.path.join(folder, name) for name in pair)
        ways.append(
            f"if it is GPT-2's, --tokenizer-type GPT2BPETokenizer --vocab-file {vocabulary} "
            f"--merge-file {merges} reads it"
        )
    elif "vocab.json" in found:
        ways.append("vocab.json needs merges.txt, which is missing")
    ways.append(
        "transformers writes tokenizer.json: "
        f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
    )
    return f"{' and '.join(found)}; {'; '.join(ways)}"
