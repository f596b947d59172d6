# SPDX-License-Identifier: Apache-2.0
"""Define Setting, a row of the table in training/settings/arguments.py, and Rule.

A rule parses and checks the text of a flag.
"""

import ast
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

MOST = (1 << 63) - 1  # the largest whole number that a flag takes
INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Rule:
    """The rule of a flag's text; this base class accepts any text."""

    metavar: str = "TEXT"  # the value in --help
    nargs: str | int | None = None  # argparse's: 0 a switch, "*" any number, "?" optional
    bare: str | None = None  # the value of a flag that is given without one
    repeated: ClassVar[bool] = False  # each use of the flag adds a value, of several words

    @property
    def what(self) -> str:
        """Return the rule in words, "" if any text is valid."""
        return ""

    def read(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError with the rule in words."""
        return text


SWITCH = Rule(nargs=0)
TEXT = Rule()
TEXTS = Rule(nargs="*")
FILE = Rule("FILE")
DIRECTORY = Rule("DIRECTORY")
SET = Rule("SET", "?", bare="")


@dataclass(frozen=True)
class Number(Rule):
    """A number between bounds; an `open` bound is exclusive."""

    low: float = 0
    high: float | None = None
    integer: bool = True
    open: bool = False  # the upper bound, or the lower one if there is no upper
    lacking: tuple[tuple[str, str], ...] = ()  # values that are refused, and what to do instead

    def read(self, text: str) -> int | float:
        """Return the number in the text."""
        number, written = (int, INTEGER) if self.integer else (float, DECIMAL)
        value = number(text) if written.fullmatch(text) else math.nan
        high = self.high if self.high is not None else MOST if self.integer else math.inf
        above = value > self.low if self.open and self.high is None else value >= self.low
        below = value < high if self.open else value <= high
        if not (above and below and math.isfinite(value)):
            too_large = " that fits into 64 bits" if self.integer and value > MOST else ""
            instead = dict(self.lacking).get(text, "")
            raise ValueError(f"must be {self.what}{too_large}{f'; {instead}' * bool(instead)}")
        return value

    @property
    def what(self) -> str:
        """Return the bounds in words."""
        what = "a whole number" if self.integer else "a number"
        if self.high is None:
            return f"{what} {'>' if self.open else '>='} {self.low}"
        if self.open:
            return f"{what} from {self.low} to below {self.high}"
        return f"{what} >= {self.low}, at most {self.high}"


@dataclass(frozen=True)
class Choice(Rule):
    """One of a few names; digits are read as a number.

    other: (other name, the one it means). lacking: (name that is refused, what to do instead).
    """

    choices: tuple[str, ...] = ()
    other: tuple[tuple[str, str], ...] = ()
    lacking: tuple[tuple[str, str], ...] = ()

    @property
    def what(self) -> str:
        """Return the choices in words."""
        return f"one of {', '.join(self.choices)}"

    def read(self, text: str) -> int | str:
        """Return the name."""
        text = dict(self.other).get(text, text)
        if text not in self.choices:
            instead = dict(self.lacking).get(text, "")
            raise ValueError(f"must be {self.what}{f'; {instead}' * bool(instead)}")
        return int(text) if text.isdigit() else text


@dataclass(frozen=True)
class Pattern(Rule):
    """A number n for every n-th layer, or a list of a 1 or 0 per layer, as ([0]*3+[1]*45)."""

    @property
    def what(self) -> str:
        """Return the rule in words."""
        return "a whole number >= 1, or a list of 1 and 0 for each layer, as ([0]*3+[1]*45)"

    def read(self, text: str) -> int | tuple[int, ...]:
        """Return the number or the list. Only lists, + and * are read; nothing is evaluated."""
        if INTEGER.fullmatch(text) and 1 <= int(text) <= 1024:
            return int(text)
        try:
            found = _listed(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            found = None
        if not isinstance(found, tuple) or not found:
            raise ValueError(f"must be {self.what}")
        return found


def _listed(node: ast.expr) -> int | tuple[int, ...]:
    """Return the list or number of an expression of +, * and [...]. Raises ValueError if other."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 1024:
        return node.value
    if isinstance(node, ast.List):
        items = tuple(_listed(each) for each in node.elts)
        if all(type(each) is int and each in (0, 1) for each in items):
            return items  # type: ignore[return-value]
    if isinstance(node, ast.BinOp):
        left, right = _listed(node.left), _listed(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            return (left + right)[:1025]
        if isinstance(node.op, ast.Mult) and isinstance(left, tuple) != isinstance(right, tuple):
            return (left * right)[:1025]  # type: ignore[operator, index]
    raise ValueError


@dataclass(frozen=True)
class Order(Rule):
    """Each of `names` once, joined by -. ep, the experts' ranks, may be added before dp."""

    names: tuple[str, ...] = ()

    def read(self, text: str) -> str:
        """Return the names without ep, whose ranks are always neighbours in a pipeline stage."""
        words = text.split("-")
        if "ep" in words and "dp" in words and words.index("ep") > words.index("dp"):
            raise ValueError(
                "the expert-parallel ranks are neighbours in a stage, so ep must stand before dp"
            )
        names = [word for word in words if word != "ep"]
        if sorted(names) != sorted(self.names):
            raise ValueError(
                f"must name each of {', '.join(self.names)} once, the fastest first, as in "
                f"{'-'.join(self.names)}"
            )
        return "-".join(names)


def integer(
    low: int = 0, high: int | None = None, lacking: tuple[tuple[str, str], ...] = ()
) -> Number:
    """Return the rule of a whole number that fits into 64 bits."""
    return Number("N", low=low, high=high, lacking=lacking)


def real(low: float = 0, high: float | None = None, open: bool = False) -> Number:
    """Return the rule of a finite number."""
    return Number("X", low=low, high=high, integer=False, open=open)


def one_of(
    *choices: str,
    bare: str | None = None,
    other: tuple[tuple[str, str], ...] = (),
    lacking: tuple[tuple[str, str], ...] = (),
    several: bool = False,
) -> Choice:
    """Return the rule of one name among `choices`.

    bare: the name that the flag means without a value. several: any number of names may be given.
    """
    shown = "{" + ",".join(choices) + "}"
    metavar = shown if len(shown) <= 40 else "NAME"
    nargs = "*" if several else "?" if bare else None
    return Choice(metavar, nargs, bare, choices, other, lacking)


POSITIVE = real(open=True)
FRACTION = real(0, 1, open=True)
WHOLES = Number("N", "*")
REALS = Number("X", "*", integer=False)
PATTERN = Pattern("N")


class Stop(NamedTuple):
    """A combination of settings that is refused.

    A condition is a flag, which holds if the setting is not at its default, or a flag with values
    joined by "|", which holds if the setting has one of them. The combination is refused if all
    conditions in `when`, joined by " & ", hold and none of those in `unless`, joined by " or ",
    does. {0}, {1}, ... in the sentence are the values of the settings in `when`.
    """

    when: str
    unless: str
    sentence: str


def flag_of(key: str) -> str:
    """Return the flag of a setting. key: the name of its field, with or without its section."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


@dataclass(frozen=True)
class Setting:
    """A row of the table in arguments.py: the effect of a flag and the rule of its value."""

    help: str
    unit: str = ""
    rule: Rule = TEXT
    default: Any = None
    off: str = ""  # the value that turns it off, and the effect; "": it is off if left out
    derived: str = ""  # its value if left out, as derived from other settings
    required: bool = False
    needs: tuple[str, ...] = ()  # flags one of which must be given for it to have an effect
    needs_value: str = ""  # the value that the first of them must have
    excludes: tuple[str, ...] = ()  # flags that must not be given with it
    stops: tuple[Stop, ...] = ()  # combinations with other settings that are refused
    ours: bool = False  # Megatron-LM has no flag of this name
    start: bool = False  # shown by --help alone
    added: bool = False  # older checkpoints lack it: a digest leaves out its default
    local: bool = False  # may differ between the ranks of a run, as a path on a node
    changes_numbers: bool = True  # False: it does not affect results, though its section does
    reported: bool | None = None  # whether a resume reports a change; None: as its section


def setting(
    default: Any,
    help: str,
    unit: str = "",
    rule: Rule | None = None,
    needs: str | tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """Return a dataclass field with a flag of its name. A default of ... makes it required.

    rule: None makes a switch of a default of False, and a text of any other.
    """
    value = None if default is ... else default
    needs = (needs,) if isinstance(needs, str) else needs
    row = Setting(help, unit, rule or (SWITCH if default is False else TEXT), value, **more)
    if default is ...:
        return field(metadata={"setting": replace(row, needs=needs, required=True)})
    return field(default=default, metadata={"setting": replace(row, needs=needs)})
