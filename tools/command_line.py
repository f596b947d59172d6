# SPDX-License-Identifier: Apache-2.0
"""What the tools' command lines share: messages fit to print, bounds, a tokenizer's flags."""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from training.data.tokenizer import OTHER_TYPE, TOKENIZER_TYPES
from training.untrusted import printable, sentence, trust_owners

MOST = (1 << 63) - 1


class Parser(argparse.ArgumentParser):
    """Print mistakes without obeying what they quote, such as escape codes for the terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def add_trust_owner(self) -> None:
        """Add the flag that names users whose checkpoints are read, besides this one and root."""
        what = "read what this user owns, too: a name or a number; may be repeated"
        self.add_argument("--trust-owner", action="append", default=[], metavar="USER", help=what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Do what argparse does, and trust the users that --trust-owner names."""
        found, rest = super().parse_known_args(args, namespace)
        try:
            trust_owners(getattr(found, "trust_owner", ()))
        except ValueError as error:
            self.error(str(error))
        return found, rest


def error_line(program: str, error: BaseException) -> str:
    """Return the line that a tool prints for an error.

    Raises the error again where it says that the reader of the output has left (mpu/needs.py).
    """
    if isinstance(error, BrokenPipeError):
        raise error
    return f"{program}: {sentence(error)}"


def integer(low: int = -MOST, high: int = MOST) -> Callable[[str], int]:
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number from {low} to {high}")
        return int(text)

    return read


def add_tokenizer(parser: argparse.ArgumentParser, left_out: str = "") -> None:
    """Add the flags by which pretrain_llama.py finds a tokenizer. left_out: the type, without."""
    add = parser.add_argument
    kinds = ", ".join(TOKENIZER_TYPES) + (f"; default: {left_out}" if left_out else "")
    kinds = textwrap.fill(kinds, 76)
    add("--tokenizer-type", required=not left_out, type=_kind, metavar="TYPE", help=kinds)
    add("--tokenizer-model", metavar="PATH", help="its file, or a Hugging Face folder")
    add("--vocab-file", metavar="PATH", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="PATH", help="default: merges.txt next to --vocab-file")


def _kind(name: str) -> str:
    if name not in TOKENIZER_TYPES:
        known = f"{name[:40]!r} is none of {', '.join(TOKENIZER_TYPES)}"
        raise argparse.ArgumentTypeError(f"{known}; {OTHER_TYPE}")
    return name


def model_of(kind: str | None, model: str | None, vocab_file: str | None) -> str | None:
    """Return the file that a tokenizer is read from. Raises ValueError for one that is not read."""
    if vocab_file is None:
        return model
    if kind not in ("GPT2BPETokenizer", None):
        raise ValueError(f"--vocab-file: {kind} does not read it: give --tokenizer-model alone")
    return vocab_file  # as in Megatron-LM, --tokenizer-model is not read
