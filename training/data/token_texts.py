# SPDX-License-Identifier: Apache-2.0
"""Find the bytes of text of each token in a model of the package tokenizers."""

import json
import re
from typing import Any

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the name of a token for a byte that falls back


def byte_alphabet() -> dict[str, int]:
    """Return {character: byte} of a byte-level vocabulary, GPT-2's bytes_to_unicode reversed."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(others)}


def texts_of(model: Any, size: int, *ends: int | None) -> list[bytes]:
    """Return the bytes of text of ids 0 to size - 1.

    There are none for special tokens, the unknown one, ids without a token, and `ends`. With a
    decoder other than ByteLevel, the text of a token is what it adds between two others.
    """
    parts = (model.normalizer, model.pre_tokenizer, model.decoder)
    of_bytes = any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)
    alphabet = byte_alphabet() if of_bytes else {}
    decode = model.decoder.decode if model.decoder is not None else "".join
    joint = decode(["a", "b"])[1:-1]

    def text(token: str) -> bytes:
        if of_bytes:
            try:
                return bytes([alphabet[letter] for letter in token])
            except KeyError:
                return token.encode()
        if byte := BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        whole = decode(["a", token, "b"])
        if not (whole.startswith("a") and whole.endswith(joint + "b")):
            return token.encode()
        return str(whole[1 : len(whole) - len(joint) - 1]).encode()

    added = model.get_added_tokens_decoder()
    none = {i for i in (*ends, _unknown(model)) if i is not None}
    none |= {i for i, token in added.items() if token.special}
    found = [b""] * size
    for token, i in model.get_vocab(with_added_tokens=True).items():
        if i not in none:
            # the letters of an added token do not encode bytes, but its spaces may be U+2581: Gemma
            found[i] = token.encode() if of_bytes and i in added else text(token)
    return found


def _unknown(model: Any) -> int | None:
    """Return the id of the unknown token, if there is one."""
    if type(model.model).__name__ == "Unigram":  # only its state has the id
        found = json.loads(model.model.__getstate__())["unk_id"]
        return None if found is None else int(found)
    name = getattr(model.model, "unk_token", None)
    return None if name is None else model.token_to_id(name)
