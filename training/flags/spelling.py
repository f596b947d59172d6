# SPDX-License-Identifier: Apache-2.0
"""Find the flags that a mistyped one may have meant."""

import difflib
import os
from collections.abc import Sequence


def like(name: str, names: Sequence[str]) -> list[str]:
    """Return up to 3 of `names` that `name` may be a slip of the pen for, the closest first.

    Case, "-" and "_" do not count. One letter may be left out, added, changed or swapped with the
    next, more in a long name.
    """
    told = {_plain(known): known for known in names}
    plain = _plain(name)
    exact = [told[plain]] if plain in told else []
    near = exact or [known for short, known in told.items() if _one_edit(plain, short)]
    alike = near or [told[p] for p in difflib.get_close_matches(plain, told, 3, cutoff=0.89)]
    return alike[:3]


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _one_edit(a: str, b: str) -> bool:
    """Return whether one letter left out, added, changed or swapped makes b of a."""
    start = len(os.path.commonprefix((a, b)))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix((a[::-1], b[::-1])))
    a, b = a[: len(a) - end], b[: len(b) - end]
    return max(len(a), len(b)) <= 1 or (len(a) == len(b) == 2 and a == b[::-1])
