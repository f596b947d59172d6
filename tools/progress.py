# SPDX-License-Identifier: Apache-2.0
"""Show how far a tool is: one line with rate and time left, on a terminal and nowhere else."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the bytes done since its last call.

    The line is cleared at the end. It goes to stderr; where that is no terminal there is none.
    """
    if not sys.stderr.isatty():
        yield int
        return
    from tqdm import tqdm  # not before set-up has installed it

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
