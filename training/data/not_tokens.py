# SPDX-License-Identifier: Apache-2.0
"""Explain what a --data-path names instead of a .bin/.idx pair, and which command makes one."""

import glob
import os
import shlex
from collections.abc import Iterable

from training.data.loss_mask import SUFFIX
from training.data.text_files import any_text
from training.files.untrusted import first_of

COMMAND = "python tools/preprocess_data.py"


def instead(prefix: str, kind: str | None, model: str | None, merges: str | None) -> str:
    """Return what exists in place of a pair, and the path to give or the command to run.

    kind, model, merges: the run's tokenizer, for the command that makes tokens of text.
    """
    for stem in (prefix, _output(prefix)):
        if made := glob.glob(f"{glob.escape(stem)}_*_document.bin"):  # of a key
            return f"did you mean {min(made).removesuffix('.bin')}?"
    folder, alone = os.path.isdir(prefix), f"{prefix}.bin"
    inside = glob.escape(prefix if folder else os.path.dirname(prefix))
    pairs = _pairs(glob.iglob(os.path.join(inside, "*.bin")))
    if folder and pairs:
        return f"it is a folder; the pairs in it are {first_of(pairs)}"
    command = _command(text := _text(prefix), kind, model, merges)
    if text:
        return f"{'it' if text == prefix else text} is text; {command}"
    if os.path.exists(prefix):
        what = "it is a folder without pairs and text" if folder else "its format is not read"
        return f"{what}; {command}"
    if os.path.exists(alone):
        return f"{alone} alone does not say where a document begins; {command}"
    if pairs:
        return f"the pairs there are {first_of(pairs)}"
    return "tools/preprocess_data.py makes a .bin/.idx pair"


def _pairs(names: Iterable[str]) -> list[str]:
    """Return the prefixes of those .bin files that have an .idx."""
    stems = sorted(name.removesuffix(".bin") for name in names)
    pairs = [each for each in stems if os.path.exists(f"{each}.idx")]
    return [each for each in pairs if not each.endswith(SUFFIX)]


def _text(prefix: str) -> str:
    """Return a prefix that is a file, folder or pattern of text, or the file of text with its name
    and an ending; else "".
    """
    if any_text(prefix):
        return prefix
    others = [] if os.path.exists(prefix) else glob.iglob(f"{glob.escape(prefix)}.*")
    return min(filter(any_text, others), default="")


def _output(text: str) -> str:
    """Return the --output-prefix for a file or folder of text."""
    folder, name = os.path.split(text.rstrip("/"))
    return os.path.join(folder, name if os.path.isdir(text) else name.partition(".")[0])


def _command(text: str, kind: str | None, model: str | None, merges: str | None) -> str:
    """Return the command that makes a pair, and the prefix of that pair."""
    output = _output(text) if os.path.exists(text) else "data/mine"
    words = ["--input", text or "TEXT", "--output-prefix", output, "--append-eod"]
    if kind in (None, "NullTokenizer"):
        kind, model = "TYPE", "FILE"  # those of a run that reads text
    file = "--vocab-file" if kind == "GPT2BPETokenizer" else "--tokenizer-model"
    words += ["--tokenizer-type", str(kind), file, model or "FILE"]
    words += ["--merge-file", merges] if merges else []
    pair = shlex.quote(f"{output}_text_document")
    return f"`{COMMAND} {shlex.join(words)}` makes a pair from text; then give {pair}"
