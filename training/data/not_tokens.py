# SPDX-License-Identifier: Apache-2.0
"""Say what a --data-path names where it names no .bin/.idx pair, and which command makes one."""

import glob
import os
import shlex
from collections.abc import Iterable

from training.data.text_files import kind_of

COMMAND = "python tools/preprocess_data.py"
SHOWN = 3  # names of pairs


def tokenizer_flags(kind: str | None, model: str | None, merges: str | None) -> str:
    """Return a run's tokenizer as the flags of COMMAND; one that reads text where it has none."""
    if kind in (None, "NullTokenizer"):
        return "--tokenizer-type TYPE --tokenizer-model FILE"
    file = "--vocab-file" if kind == "GPT2BPETokenizer" else "--tokenizer-model"
    words = ["--tokenizer-type", str(kind), file, model or "FILE"]
    return shlex.join([*words, *(["--merge-file", merges] if merges else [])])


def refuse(flag: str, prefix: str, tokenizer: str) -> None:
    """Raise ValueError, naming the flag, where a prefix has no .idx, or is text, or a folder.

    tokenizer: the run's flags that name its tokenizer, for the command that makes tokens of text.
    """
    if os.path.exists(f"{prefix}.idx") or prefix.endswith((".bin", ".idx")) and _pairs([prefix]):
        return
    named = f"{flag}: {prefix}"
    folder = os.path.isdir(prefix)
    if folder and (pairs := _pairs(glob.iglob(os.path.join(glob.escape(prefix), "*.idx")))):
        raise ValueError(f"{named} is a folder: name the pairs in it, {pairs}")
    if text := _text(prefix):
        what = (
            f"{named} is text" if text == prefix else f"{named} has no tokens, and {text} is text"
        )
        raise ValueError(f"{what}, of which {_command(text, tokenizer)}")
    other = prefix if os.path.exists(prefix) else f"{prefix}.bin"
    if os.path.exists(other):
        why = " without the .idx that says where its documents begin" * other.endswith(".bin")
        raise ValueError(
            f"{named} is no .bin/.idx pair: {other} is a {'folder' if folder else 'file'}{why}, "
            f"and tokens in other formats are not read; of text {_command('TEXT', tokenizer)}"
        )
    begins = _pairs(glob.iglob(glob.escape(prefix) + "*.idx"))
    near = os.path.join(glob.escape(os.path.dirname(prefix)), "*.idx")
    pattern = glob.has_magic(prefix) and _pairs(glob.iglob(prefix))
    if pairs := pattern or begins or _pairs(glob.iglob(near)):
        raise ValueError(
            f"{named}.idx: cannot be read: No such file or directory; "
            + ("a pattern is not read: name each pair, " if pattern else "the pairs there are ")
            + pairs
        )


def _pairs(names: Iterable[str]) -> str:
    """Return the prefixes of the pairs among files, the first few of them."""
    stems = sorted({os.path.splitext(name)[0] for name in names if name[-4:] in (".bin", ".idx")})
    found = [each for each in stems if all(os.path.exists(each + s) for s in (".bin", ".idx"))]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _text(prefix: str) -> str:
    """Return what is text: the name itself, a file of text or a folder or pattern of some, or the
    name with the ending of one; else "".
    """
    if os.path.isdir(prefix):
        names = (file for _, _, files in os.walk(prefix) for file in files)
        return prefix if any(map(_is_text, names)) else ""
    if os.path.exists(prefix):
        return prefix if _is_text(prefix) else ""
    if glob.has_magic(prefix) and any(map(_is_text, glob.iglob(prefix, recursive=True))):
        return prefix
    ended = sorted(filter(_is_text, glob.iglob(glob.escape(prefix) + ".*")))
    return ended[0] if ended else ""


def _is_text(name: str) -> bool:
    try:
        return bool(kind_of(name))
    except ValueError:
        return False


def _command(text: str, tokenizer: str) -> str:
    """Return "COMMAND makes a pair, and --data-path PREFIX reads it"."""
    output = text.rstrip("/")
    if os.path.isdir(text) or not glob.has_magic(text):
        folder, _, name = output.rpartition("/")
        output = os.path.join(folder, name if os.path.isdir(text) else name.partition(".")[0])
    else:
        output = "data/mine"
    words = shlex.join(["--input", text, "--output-prefix", output, "--append-eod"])
    pair = shlex.quote(f"{output}_text_document")
    return f"`{COMMAND} {words} {tokenizer}` makes a pair, which is then named {pair}"
