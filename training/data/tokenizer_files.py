# SPDX-License-Identifier: Apache-2.0
"""Find the files that make up a tokenizer, and compare the digests of tokenizers.

A checkpoint holds all files of its run's tokenizer, so that it can be moved, sampled from and
exported. The file that --tokenizer-model names is the first of them.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from training.data.hf_tokenizer import (
    ADDED,
    CONFIG,
    IDS,
    JSON,
    MODEL_CONFIG,
    SPECIAL,
    HuggingFaceTokenizer,
    auto_tokenizer_of,
    of_model,
)
from training.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_of
from training.files.untrusted import open_plain, read_json

STANDARD = {  # the name that a type's own file has in a Hugging Face directory
    "HuggingFaceTokenizer": JSON,
    "GPT2BPETokenizer": "vocab.json",
}
MODEL = "tokenizer.model"  # the name for all other types
TOKENIZER_FILES = (
    *(JSON, MODEL, CONFIG, SPECIAL, ADDED, "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def files_of(kind: str | None, path: str | None, merge_file: str | None = None) -> dict[str, str]:
    """Return {name in a checkpoint: path} of a tokenizer's files, the one at `path` first.

    kind, path, merge_file: --tokenizer-type, --tokenizer-model and --merge-file. Files next to it
    with a name of TOKENIZER_FILES are its own if its name is one of them too; else, as in a folder
    of many tokenizers, only those that are read with it are.
    """
    if not path or not kind:
        return {}
    if os.path.isdir(path):
        path = os.path.join(path, STANDARD.get(kind, MODEL))
    if not os.path.isfile(path):
        return {}
    folder, name = os.path.split(path)
    found = {name: path}
    if kind == "GPT2BPETokenizer":
        found["merges.txt"] = merge_file or os.path.join(folder, "merges.txt")
    others: tuple[str, ...] = TOKENIZER_FILES if name in TOKENIZER_FILES else ()
    if kind == "HuggingFaceTokenizer":
        others = (*others, CONFIG, SPECIAL, ADDED)
    for other in others:
        if os.path.isfile(os.path.join(folder, other)):
            found.setdefault(other, os.path.join(folder, other))
    return found


def with_class(
    files: dict[str, bytes], here: str | None, there: str | None = None, own: str = JSON
) -> dict[str, bytes]:
    """Return a tokenizer's files, changed so that another folder reads them as this one does.

    A folder's config.json may choose the class that reads `own`. If the other folder's has another
    model_type, tokenizer_config.json names the class. here: this folder, None if it has no
    config.json. there: the model_type in the other folder's config.json, None if it has none, as a
    checkpoint.
    """
    try:
        beside = {name: files[name] for name in (CONFIG, SPECIAL, ADDED) if name in files}
        read = {JSON: files[own], **beside}
        if here is not None and os.path.isfile(path := os.path.join(here, MODEL_CONFIG)):
            read |= of_model(read_json(path, foreign=True))
        model = json.loads(read.get(MODEL_CONFIG, b"{}"))
        if model.get("model_type") == there:
            return files
        name = type(auto_tokenizer_of(read, own)).__name__ if len(read) > 1 else ""
        config = json.loads(files.get(CONFIG, b"{}"))
    except (LookupError, ValueError, AttributeError):
        return files  # not of this kind, or its reader reports what is wrong
    plain = name in ("", "TokenizersBackend")
    name = "PreTrainedTokenizerFast" if plain else name
    if plain and not beside and there is None:
        return files  # a tokenizer.json alone is read as it is
    if str(config.get("tokenizer_class")).removesuffix("Fast") == name.removesuffix("Fast"):
        return files
    config["tokenizer_class"] = name
    return {**files, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def heads_of(directory: str) -> dict[str, bytes]:
    """Return the beginnings of the files that determine a directory's tokenizer (tokenizer_of)."""
    heads = {}
    for name in (JSON, MODEL):
        if os.path.isfile(at := os.path.join(directory, name)):
            with open_plain(at) as file:
                heads[name] = file.read(1000)
    return heads


def tokenizer_in(
    state: Mapping[str, Any], directory: str, vocab_size: int | None = None
) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or of a Hugging Face directory, from its own files.

    state: the checkpoint's, with tokenizer_type and tokenizer_model; without them, the files
    determine it. None if there is no tokenizer. Raises ValueError if its file is not a tokenizer.
    """
    kind, model = state.get("tokenizer_type"), state.get("tokenizer_model")
    if kind is None:
        found = tokenizer_of(heads_of(directory))
        kind, model = found.get("tokenizer_type"), found.get("tokenizer_model")
    if kind is None:
        return None
    if model and os.path.isfile(os.path.join(directory, model)):
        model = os.path.join(directory, model)
    return build_tokenizer(kind, model, vocab_size)


@cache
def digests_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the digests by which checkpoints identify their tokenizer, now and in older versions.

    Older digests cover less of what determines ids; if this matters, they are left out.
    """
    names = ("tokenizer_digest_file", "tokenizer_digest_before", "tokenizer_sha256")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return dict.fromkeys(("tokenizer_digest", *names[1:]), tokenizer.digest())
    digest, *older = tokenizer.digests()
    older += [tokenizer.sha256()] * bool(older)
    before = dict(zip(names[-len(older) :], older, strict=True)) if older else {}
    return {"tokenizer_digest": digest, **before}


def same_tokenizer(
    known: object, digests: Mapping[str, str], files: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Return whether a checkpoint's tokenizer_digest, `known`, is that of the tokenizer `digests`.

    files: those of its manifest. An older checkpoint's digest covers tokenizer_config.json, which
    may have another chat template now, or may not have been kept. Then its own copy of
    tokenizer.json decides.
    """
    names = ("tokenizer_digest", "tokenizer_digest_file", "tokenizer_digest_before")
    if known in [digests[name] for name in names if name in digests]:
        return True
    older = isinstance(known, str) and not known.startswith(IDS)
    hashes = [info.get("sha256") for info in files.values()]
    return older and digests.get("tokenizer_sha256", "") in hashes
