# SPDX-License-Identifier: Apache-2.0
"""Load the compiled library of csrc/ through ctypes: C functions, no torch or Python headers.

`make setup` builds build/weft_native.so where a C++ compiler is present. Without it everything
still works, but more slowly.
"""

import ctypes
from functools import cache
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "build" / "weft_native.so"


@cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None if it is not built or does not load (see `reason`)."""
    try:
        return ctypes.CDLL(str(PATH))
    except OSError:
        return None


def reason() -> str:
    """Return a sentence on why `load` returns None, or an empty string."""
    if not PATH.exists():
        return f"{PATH.name} is not built: run `make setup` with a C++ compiler on the path"
    try:
        ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"{PATH.name} does not load: {error}"
    return ""
