# SPDX-License-Identifier: Apache-2.0
"""What the tools' command lines share: messages fit to print, whole numbers with bounds."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from training.untrusted import printable, sentence

MOST = (1 << 63) - 1


class Parser(argparse.ArgumentParser):
    """Print mistakes without obeying what they quote, such as escape codes for the terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def told(program: str, error: BaseException) -> str:
    """Return the line that a tool prints for an error."""
    return f"{program}: {sentence(error)}"


def whole(low: int = -MOST, high: int = MOST) -> Callable[[str], int]:
    """Return a type for add_argument: a whole number from `low` to `high`."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number from {low} to {high}")
        return int(text)

    return read
