# SPDX-License-Identifier: Apache-2.0
"""Read a flag's number and check its bounds."""

import math
import re

from training.config import UsageError

MOST = (1 << 63) - 1  # the largest whole number that a flag takes
WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_number(name: str, text: str, rule: str) -> int | float:
    """Return the number that `text` writes out. Raises UsageError naming flag, text and rule.

    rule: int or float, then >=, > or both ends, as in int>=1, float>0, int[1,1000], float[0,1).
    """
    whole = rule.startswith("int")
    number, written = (int, WHOLE) if whole else (float, DECIMAL)
    bound = rule.removeprefix("int").removeprefix("float")
    what, beyond = "a whole number" if whole else "a number", bound == ">0"
    if bound.startswith("["):
        low, high = bound.strip("[])").split(",")
        what += f" from 0 to below {high}" if bound.endswith(")") else f" >= {low}, at most {high}"
    else:
        low, high = bound.lstrip(">="), str(MOST) if whole else "inf"
        what += f" {'>' if beyond else '>='} {low}"
    value = number(text) if written.fullmatch(text) else math.nan
    above = value > number(low) if beyond else value >= number(low)
    below = value < number(high) if bound.endswith(")") else value <= number(high)
    if not (above and below and math.isfinite(value)):
        what += " that fits into 64 bits" if whole and value > MOST else ""
        raise UsageError(f"{name} {text}: must be {what}")
    return value
