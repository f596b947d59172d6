# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face tokenizer.json, and the files next to it, as transformers does."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.data.foreign_code import begin, calling, read_model
from training.data.tik_tokenizer import LLAMA3, is_ranks
from training.data.token_texts import texts_of
from training.files.untrusted import parse_json

IDS = "ids:"  # prefix of a digest that covers everything that determines ids, and nothing else
JSON = "tokenizer.json"
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
ADDED, MODEL_CONFIG = "added_tokens.json", "config.json"
VERSIONS = "fast_tokenizer_files"  # of CONFIG: files in place of JSON
# a token's fields, and a BPE's settings, that determine ids
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
UNKNOWN = ("unk_token", "fuse_unk")
OPTIONS = (*UNKNOWN, "byte_fallback", "ignore_merges", "continuing_subword_prefix",
           "end_of_word_suffix", "max_input_chars_per_word")  # fmt: skip


def of_model(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a config.json with the fields that choose a tokenizer's class alone, {} if none do."""
    found = {key: config.get(key) for key in ("model_type", "tokenizer_class") if config.get(key)}
    return {MODEL_CONFIG: json.dumps(found).encode()} if found else {}


def auto_tokenizer_of(files: Mapping[str, bytes], path: str, mute: bool = False) -> Any:
    """Return the tokenizer that transformers.AutoTokenizer makes of a folder with these files.

    files: {name: contents}; no other file of the user's folder is read, and code that comes with a
    tokenizer is never run. path: that of the user's tokenizer.json. mute: see `calling`. Raises
    ValueError, which begins with `path`.
    """
    config = json.loads(files.get(CONFIG, b"{}"))
    if (versions := config.get(VERSIONS)) and versions != [JSON]:
        raise ValueError(f"{path}: {CONFIG} lists {VERSIONS} {versions}, and only {JSON} is read")
    try:
        import transformers
    except ImportError:
        others = " and ".join(name for name in files if name != JSON)
        raise ValueError(
            f"{path}: transformers, which reads {others}, is not installed: pip install "
            f"transformers, or give a folder with {JSON} alone"
        ) from None
    transformers.logging.set_verbosity_error()
    what = f"{path}: transformers {transformers.__version__} cannot read this tokenizer"
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        try:
            with calling(what, mute):
                made = transformers.AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
        except ValueError as error:
            if code := config.get("auto_map"):
                raise ValueError(
                    f"{path}: auto_map {code} is code that comes with the tokenizer, which is "
                    "never run; without auto_map, and with PreTrainedTokenizerFast as "
                    f"tokenizer_class, {JSON} is read as it is"
                ) from None
            raise ValueError(str(error).replace(folder, os.path.dirname(path))) from None
    if getattr(made, "backend_tokenizer", None) is None:
        name = type(made).__name__
        raise ValueError(f"{path}: tokenizer_class {name} is not one of the package tokenizers")
    return made


class HuggingFaceTokenizer:
    """Read a tokenizer.json, or the one in a folder, and the files next to it.

    The package tokenizers reads a tokenizer.json alone, transformers.AutoTokenizer one with others
    of its files beside it. bos and eod are the bos_token and eos_token that transformers finds; if
    there is none, it is the special token with one of the names in BOS or EOD, provided that there
    is exactly one.
    """

    BOS = ("<|begin_of_text|>", "<s>", "<bos>")
    EOD = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Model

        self.name = "HuggingFaceTokenizer"
        if os.path.isdir(path):
            path = os.path.join(path, JSON)
        if not os.path.lexists(path) and (others := _others(os.path.dirname(path))):
            raise ValueError(f"--tokenizer-model: there is no {path}, but {others}")
        self._bytes = read_model(path)
        with calling(f"--tokenizer-model {path} is not a tokenizer.json", mute=True):
            self._model = raw = Model.from_buffer(self._bytes)
        files, first = {JSON: self._bytes}, None  # first: what the files name as bos
        for name in (CONFIG, SPECIAL, ADDED, MODEL_CONFIG):
            if not os.path.exists(other := os.path.join(os.path.dirname(path), name)):
                continue
            data = read_model(other)
            found = parse_json(data, other, foreign=True)
            if not isinstance(found, dict):
                raise ValueError(f"{other} is not a JSON object")
            files |= of_model(found) if name == MODEL_CONFIG else {name: data}
            if name in (CONFIG, SPECIAL):
                first = first or found.get("bos_token")
        self._config = files.get(CONFIG, b"{}")
        ends: dict[str, str] = {}  # the texts of bos and eos
        if len(files) > 1:
            made = auto_tokenizer_of(files, path, mute=True)
            self._model = made.backend_tokenizer
            self._model.encode_special_tokens = bool(made.split_special_tokens)
            named = {"bos": made.bos_token, "eos": made.eos_token}
            ends = {name: text for name, text in named.items() if text is not None}
        for each in (raw, self._model):
            each.no_truncation()  # a document is taken whole, and nothing is added to it
            each.no_padding()
        if dropout := getattr(self._model.model, "dropout", None):
            raise ValueError(
                f"{path}: its BPE has dropout {dropout:.3g}, which tokenizes a text differently "
                "each time: set dropout to null"
            )
        with calling(f"--tokenizer-model {path}", mute=True):
            begun = self._model.encode("").ids[:1]
            vocabulary = self._model.get_vocab(with_added_tokens=True)
        have = self._model.get_added_tokens_decoder()
        self._cuts = cuts(self._model)
        self._as_file = self._cuts == cuts(raw)  # tokenizer.json alone gives the same ids
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special_texts = [token.content for token in have.values() if token.special]

        def token_id(name: str, usual: Sequence[str]) -> int | None:
            texts = [ends[name]] if name in ends else [t for t in usual if t in special_texts]
            return self._model.token_to_id(texts[0]) if len(texts) == 1 else None

        self.bos, self.eod = token_id("bos", self.BOS), token_id("eos", self.EOD)
        self.starts_with_bos = self.bos is not None and begun == [self.bos]
        # bos as in earlier versions, which also took a token that is not special
        text = first.get("content") if isinstance(first, dict) else first
        ids = (raw.token_to_id(each) for each in ([str(text)] if text is not None else self.BOS))
        self._bos = next((i for i in ids if i is not None), None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle: the library's pickle of its tokenizer lacks one setting."""
        self.__dict__ |= state
        self._model.encode_special_tokens = bool(self._cuts.get("split_special_tokens"))

    def _parsed(self) -> dict[str, Any]:
        """Return the object in tokenizer.json, {} if only the library can parse it."""
        try:
            found: dict[str, Any] = json.loads(self._bytes)
        except ValueError:
            return {}
        return found

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


def _has_bytes(model: Any, byte_fallback: bool) -> bool:
    """Return whether a BPE has a piece for each byte, so that no text is unknown to it."""
    from tokenizers import pre_tokenizers

    letters: Sequence[str] = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = letters if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    return all(model.token_to_id(letter) is not None for letter in letters)


def cuts(model: Any) -> dict[str, Any]:
    """Return the settings of a tokenizers.Tokenizer that determine ids, besides the vocabulary.

    The result does not depend on how files spell them: settings that are off, or only affect
    offsets, are left out. The merges are not part of it either.
    """
    options = {key: getattr(model.model, key, None) for key in OPTIONS}
    parts = {part: getattr(model, part) for part in ("normalizer", "pre_tokenizer")}
    states = {k: json.loads(v.__getstate__()) for k, v in parts.items() if v is not None}
    fallback = bool(options["byte_fallback"])
    if (fallback or "ByteLevel" in str(states)) and _has_bytes(model.model, fallback):
        options |= dict.fromkeys(UNKNOWN)
    tokens, split = model.get_added_tokens_decoder(), model.encode_special_tokens
    flags = FLAGS if split else FLAGS[:-1]  # that determine matches in a text
    added = [[i, *(getattr(tokens[i], flag) for flag in flags)] for i in sorted(tokens)]
    found: dict[str, Any] = stated({**options, **states, "split_special_tokens": split})
    return {**found, "added_tokens": added}


def stated(value: Any) -> Any:
    """Return a JSON value without fields that are off or only affect offsets."""
    if isinstance(value, dict):
        fields = value.items()
        return {k: stated(v) for k, v in fields if v not in ("", None) and v is not False
                and k != "trim_offsets"}  # fmt: skip
    return [stated(v) for v in value] if isinstance(value, list) else value


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
