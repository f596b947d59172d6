# SPDX-License-Identifier: Apache-2.0
"""Write the files with which transformers.AutoTokenizer gives the same ids as a tokenizer.

transformers converts a SentencePiece model into one of `tokenizers` when it loads it, and loses the
user-defined pieces: a newline with its indentation gets other ids. So the conversion is made here,
for models that do not normalize text, such as those of tools/train_tokenizer.py. The wire format
of a .model is that of sentencepiece_model.proto (github.com/google/sentencepiece).
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

from training.data.hf_tokenizer import CONFIG
from training.data.token_texts import SPACE
from training.data.tokenizer import Tokenizer
from training.data.tokenizer_files import MODEL

JSON = "tokenizer.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType


def auto_tokenizer(files: dict[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files to add for AutoTokenizer: tokenizer_config.json, and tokenizer.json if that
    keeps the ids of a SentencePiece model.

    files: {name: bytes} of the tokenizer's own files, which are not replaced. The result is empty
    for a tokenizer that transformers does not read from such files (TikTokenizer, NullTokenizer),
    and if there is a tokenizer_config.json.
    """
    if CONFIG in files:
        return {}
    more: dict[str, bytes] = {}
    special: dict[str, Any] = {}
    classes = {JSON: "PreTrainedTokenizerFast", "vocab.json": "GPT2TokenizerFast"}
    name = next((classes[file] for file in classes if file in files), None)
    if name is None and MODEL in files and tokenizer.name != "TikTokenizer":
        pieces, settings = read(files[MODEL])
        at = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
        special = {key: pieces[i][0] for key, i in at.items() if i is not None}
        special["unk_token"] = next(piece for piece, _, kind in pieces if kind == UNKNOWN)
        name = "LlamaTokenizer"
        if settings == (BPE, False, False, b""):
            name, more[JSON] = "PreTrainedTokenizerFast", converted(pieces)
    elif JSON in files:
        vocabulary = json.loads(files[JSON])
        named = {token["id"]: token["content"] for token in vocabulary.get("added_tokens", ())}
        for key, i in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eod)):
            special |= {key: named[i]} if i in named else {}
    if name is None:
        return {}
    config = {
        "tokenizer_class": name,
        **special,
        "add_bos_token": tokenizer.starts_with_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    return {**more, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a protobuf message that SentencePiece can read."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = varint(at)
        yield key >> 3, message[at : at + size]
        at += size


def read(model: bytes) -> tuple[list[tuple[str, float, int]], tuple[int, bool, bool, bytes]]:
    """Return a SentencePiece model's (piece, score, type), and (model_type, add_dummy_prefix,
    remove_extra_whitespaces, precompiled_charsmap).
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in fields(model):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            one: dict[int, Any] = dict(fields(value))
            (score,) = struct.unpack("<f", one.get(2, bytes(4)))
            pieces.append((one[1].decode(), score, one.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(fields(value))
        elif number == 3:
            normalizer = dict(fields(value))
    prefix, removed = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
    return pieces, (trainer.get(3, 1), prefix, removed, normalizer.get(2, b""))


def converted(pieces: list[tuple[str, float, int]]) -> bytes:
    """Return the tokenizer.json of a BPE model that does not normalize text.

    SentencePiece merges the two neighbours whose joint piece has the highest score, however it is
    split. So each split of a piece into two others is a merge, in the order of the pieces' scores.
    """
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Model

    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    normal = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    merges = [
        (piece[:at], piece[at:])
        for piece in sorted(normal, key=lambda p: (-normal[p], ids[p]))
        for at in range(1, len(piece))
        if piece[:at] in normal and piece[at:] in normal
    ]
    unknown = next(piece for piece, _, kind in pieces if kind == UNKNOWN)
    bpe = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    model = Model(bpe)
    model.normalizer = normalizers.Replace(" ", SPACE)
    model.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    model.add_special_tokens(
        [AddedToken(p, normalized=False) for p, _, kind in pieces if kind in (UNKNOWN, CONTROL)]
    )
    model.add_tokens([AddedToken(p, normalized=True) for p, _, k in pieces if k == USER_DEFINED])
    return model.to_str().encode()
