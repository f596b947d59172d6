# SPDX-License-Identifier: Apache-2.0
"""Define what a row of the table of settings (training/settings/arguments.py) consists of.

A rule reads the text of a flag.
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
    """What the text of a flag must be; here any."""

    metavar: str = "TEXT"  # how --help writes the value
    nargs: str | int | None = None  # argparse's: 0 a switch, "*" any number, "?" may be bare
    bare: str | None = None  # what the flag means without a value
    repeated: ClassVar[bool] = False  # each use of the flag adds a value, of several words

    @property
    def what(self) -> str:
        """Return what the text must be, "" where any will do."""
        return ""

    def read(self, text: str) -> Any:
        """Return the value. Raises ValueError, which says what the text must be."""
        return text


SWITCH = Rule(nargs=0)
TEXT = Rule()
TEXTS = Rule(nargs="*")
FILE = Rule("FILE")
DIRECTORY = Rule("DIRECTORY")
SET = Rule("SET", "?", bare="")


@dataclass(frozen=True)
class Number(Rule):
    """A number between bounds. A bound that is `open` is not reached."""

    low: float = 0
    high: float | None = None
    integer: bool = True
    open: bool = False  # the upper bound, or the lower one where there is no upper
    lacking: tuple[tuple[str, str], ...] = ()  # words that are refused, and what to do instead

    def read(self, text: str) -> int | float:
        """Return the number that the text writes out."""
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
    """One of a few names; digits are read as a number. other: older names, and what they mean.
    lacking: names that are known and refused, and what to do instead.
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
    """Every how many-th layer, or a list of 1 and 0 for each layer, as ([0]*3+[1]*45)."""

    @property
    def what(self) -> str:
        """Return the rule in words."""
        return "a whole number >= 1, or a list of 1 and 0 for each layer, as ([0]*3+[1]*45)"

    def read(self, text: str) -> int | tuple[int, ...]:
        """Return the number, or the list. Nothing is evaluated: lists, + and * are read."""
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
    """Return the list or number that +, * and [...] write out. Raises ValueError for all else."""
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
    """All of some names once, joined by -. Experts' ranks, ep, may stand before dp."""

    names: tuple[str, ...] = ()

    def read(self, text: str) -> str:
        """Return the names without ep, which always are neighbours in a pipeline stage."""
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
    """Return the rule of a name; `bare`: the flag may have no value, and then means this name.

    several: of any number of names.
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
    """A rule between settings: what breaks it is refused.

    A condition is a flag, which holds where the setting is not at its default, or a flag with the
    values at which it holds, joined by "|". `when` has conditions that hold together, joined by
    " & "; the rule is kept where one of those in `unless`, joined by " or ", holds. {0}, {1}, ...
    in the sentence are the values of the conditions in `when`.
    """

    when: str
    unless: str
    sentence: str


def flag_of(key: str) -> str:
    """Return the flag of a setting, by its field's name, with or without its section."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


@dataclass(frozen=True)
class Setting:
    """A row of the table in arguments.py: what a flag does, what its value may be."""

    help: str
    unit: str = ""
    rule: Rule = TEXT
    default: Any = None
    off: str = ""  # what turns it off, and what happens then; "" where that is to leave it out
    derived: str = ""  # the value that other settings give it where it is left out
    required: bool = False
    needs: tuple[str, ...] = ()  # the flags of which it needs one to have an effect
    needs_value: str = ""  # that the first of them must have
    excludes: tuple[str, ...] = ()  # flags that must not be given with it
    stops: tuple[Stop, ...] = ()  # what it cannot be together with, or without
    ours: bool = False  # Megatron-LM has no flag of this name
    start: bool = False  # shown by --help alone
    added: bool = False  # older checkpoints lack it and had its default: a digest leaves that out
    local: bool = False  # may differ between the ranks of a run: a place on a node
    changes_numbers: bool = True  # in a section that defines the numbers of the run
    reported: bool | None = None  # a resume says where it differs; None: as its section does


def setting(
    default: Any,
    help: str,
    unit: str = "",
    rule: Rule | None = None,
    needs: str | tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """Return a dataclass field with a flag of its name. A default of ... makes it required.

    rule: left out, a default of False makes a switch and any other a text.
    """
    value = None if default is ... else default
    needs = (needs,) if isinstance(needs, str) else needs
    row = Setting(help, unit, rule or (SWITCH if default is False else TEXT), value, **more)
    if default is ...:
        return field(metadata={"setting": replace(row, needs=needs, required=True)})
    return field(default=default, metadata={"setting": replace(row, needs=needs)})
