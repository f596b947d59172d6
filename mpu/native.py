# SPDX-License-Identifier: Apache-2.0
"""Load the compiled library of csrc/ (plain C functions, no torch or Python headers) through
ctypes.

`make setup` builds build/weft_native.so where a C++ compiler is present. Everything that uses it
has a twin in Python, so its absence costs time, never function.
"""

import ctypes
from functools import cache
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "build" / "weft_native.so"


@cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (see `reason`)."""
    try:
        return ctypes.CDLL(str(PATH))
    except OSError:
        return None


def reason() -> str:
    """Say in a sentence why `load` returns None; empty when it does not."""
    if not PATH.exists():
        return f"{PATH.name} is not built: run `make setup` with a C++ compiler on the path"
    try:
        ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"{PATH.name} does not load: {error}"
    return ""
