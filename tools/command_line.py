# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tools' command lines: printable messages, bounds, a tokenizer's flags."""

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from training.data.tokenizer import OTHER_TYPE, TOKENIZER_TYPES
from training.files.untrusted import printable, sentence, trust_owners

MOST = (1 << 63) - 1
# {flag of these tools: its names in nanoGPT, litgpt, transformers, lm-eval and Megatron-LM}
OTHER_NAMES = {
    "--prompt": "--start --prompts --text --input-text",
    "--max-new-tokens": "--max-tokens --max-gen-len --max-length --num-tokens-to-generate --length",
    "--num-samples": "--num-return-sequences --n-samples",
    "--load": """--model --model-args --model-path --model-name-or-path --pretrained --checkpoint
        --checkpoint-dir --checkpoint-path --ckpt --ckpt-dir --out-dir --load-dir""",
    "--save": "--save-dir --output-dir --out-dir",
    "--output": "--out --output-path --output-file --output-dir --save",
    "--tp": "--tensor-model-parallel-size --tensor-parallel-size --tp-size",
    "--pp": "--pipeline-model-parallel-size --pipeline-parallel-size --pp-size",
    "--output-prefix": "--output --output-path --output-dir --out",
    "--tokenizer-model": "--tokenizer --tokenizer-path --tokenizer-dir --tokenizer-name-or-path",
    "--json-keys": "--text-column --text-key --dataset-text-field",
}


class Parser(argparse.ArgumentParser):
    """A parser that prints mistakes without the escape codes that they may quote, and refuses an
    empty Path, which would be the current folder. doc: of the tool, for --help.
    """

    def __init__(self, doc: str | None = None, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        own = {"description": doc, "formatter_class": raw, "allow_abbrev": False}
        super().__init__(**{**own, **options})
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but accept _ for - in flags, and report an unknown flag before
        missing ones, with the flag that may be meant.
        """
        known = self._flags()
        words, unknown = list[str](), list[str]()
        given = list(sys.argv[1:] if args is None else args)
        for i, word in enumerate(given):
            if word == "--":
                words += given[i:]
                break
            name, equals, value = word.partition("=")
            dashed = name.replace("_", "-")
            if name not in known and dashed in known:
                word = f"{dashed}{equals}{value}"
            elif " " in word:  # to argparse, too: a value, such as the flags of another program
                pass
            elif word.startswith("--") and name not in known:
                unknown.append(name + _meant(dashed, known))
            words.append(word)
        if unknown:
            self.error("not a flag of this tool: " + "; ".join(unknown))
        return super().parse_args(words, namespace)

    def _flags(self) -> list[str]:
        """Return the flags of this parser and of its commands."""
        flags = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for each in action.choices.values() for flag in each._flags()]
        return flags

    def add_trust_owner(self) -> None:
        """Add the flag that names users whose checkpoints are read, besides this one and root."""
        what = "also read files that this user (name or number) owns; may be repeated"
        self.add_argument("--trust-owner", action="append", default=[], metavar="USER", help=what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and trust the users that --trust-owner names."""
        found, rest = super().parse_known_args(args, namespace)
        try:
            trust_owners(getattr(found, "trust_owner", ()))
        except ValueError as error:
            self.error(str(error))
        return found, rest


def _meant(name: str, known: Sequence[str]) -> str:
    """Return a question that suggests a flag of `known` for a name, "" if none is similar."""
    found = [flag for flag, names in OTHER_NAMES.items() if flag in known and name in names.split()]
    found = found or difflib.get_close_matches(name, known, 1, 0.75)
    return f" (did you mean {found[0]}?)" if found else ""


def error_line(program: str, error: BaseException, output: str = "") -> str:
    """Return the line that a tool prints for an error.

    output: the flag and value of the output, for an error of a write, which names no file.
    Raises the error again if the reader of the output has closed the pipe (mpu/needs.py).
    """
    if isinstance(error, BrokenPipeError):
        raise error
    if output and isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"{program}: {printable(output)}: {error.strerror}"
    return f"{program}: {sentence(error)}"


def integer(low: int = -MOST, high: int = MOST) -> Callable[[str], int]:
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
        if len(digits) >= 20 or not low <= int(text) <= high:
            rule = f"must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text[:40]} {rule}")
        return int(text)

    return read


def number(low: float) -> Callable[[str], float]:
    """Return an argparse type for a finite number of at least `low`."""

    def read(text: str) -> float:
        value = float(text)
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {low:g}")
        return value

    read.__name__ = "number"
    return read


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: name a file or folder")
    return Path(text)


def prefix(text: str) -> str:
    """An argparse type for the prefix of the names of written files."""
    if os.path.basename(text) in ("", ".", ".."):
        rule = "must end in a name, with which the names of the files begin"
        raise argparse.ArgumentTypeError(f"{text!r} {rule}")
    return text


def add_tokenizer(parser: argparse.ArgumentParser, left_out: str = "") -> None:
    """Add the flags of pretrain_llama.py for a tokenizer. left_out: the default, for --help."""
    add = parser.add_argument
    kinds = ", ".join(TOKENIZER_TYPES) + (f"; default: {left_out}" if left_out else "")
    kinds = textwrap.fill(kinds, 76)
    add("--tokenizer-type", required=not left_out, type=_kind, metavar="TYPE", help=kinds)
    add("--tokenizer-model", metavar="PATH", help="tokenizer file, or Hugging Face folder")
    add("--vocab-file", metavar="PATH", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="PATH", help="default: merges.txt next to --vocab-file")


def _kind(name: str) -> str:
    if name not in TOKENIZER_TYPES:
        known = f"{name[:40]!r} is none of {', '.join(TOKENIZER_TYPES)}"
        raise argparse.ArgumentTypeError(f"{known}; {OTHER_TYPE}")
    return name


def model_of(kind: str | None, model: str | None, vocab_file: str | None) -> str | None:
    """Return a tokenizer's file. Raises ValueError if its type does not read --vocab-file."""
    if vocab_file is None:
        return model
    if kind not in ("GPT2BPETokenizer", None):
        raise ValueError(f"--vocab-file: {kind} does not use it: give only --tokenizer-model")
    return vocab_file  # as in Megatron-LM, --tokenizer-model is ignored
