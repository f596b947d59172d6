# SPDX-License-Identifier: Apache-2.0
"""Leave most cases of a long test to `make prove`."""

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """Return the cases for parametrize: of each `every` the first is in `make test`, all in prove.

    A case is a value, or a tuple of values for several names.
    """
    found = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=pytest.mark.prove if i % every else ()))
    return found
