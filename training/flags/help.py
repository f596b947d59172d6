# SPDX-License-Identifier: Apache-2.0
"""Word what --help says of a flag."""

import re
from typing import Any

from training.flags import table
from training.flags.megatron import SOURCE
from training.flags.table import Flag

USAGE = """
  pretrain_llama.py FLAGS                                      one process
  torchrun --nproc-per-node N pretrain_llama.py FLAGS          N ranks on this host
  WORLD_SIZE=N pretrain_llama.py --dry-run FLAGS               says what N ranks would do
  python tools/checkpoint.py --help, tools/generate.py --help  what to do with the result"""


def epilog() -> str:
    kinds = [flag.kind for flag in table.known_flags().values()]
    return (
        f"{kinds.count(table.CHECKED_KIND)} more of Megatron-LM's flags are accepted as they stand "
        f"and {kinds.count(table.REFUSED_KIND)} are refused with the reason: "
        f"{SOURCE} lists them all."
    )


def help_of(flag: Flag, default: Any) -> str:
    """Return the help text: what the flag does, its unit, and its default or off-value.

    default: the value that its section of Config has without it, None where it has none.
    """
    named = "default" in flag.unit or "required" in flag.unit or default in (None, False, ())
    tail = "" if named else f"; default: {_show(default)}"
    choices = f"; one of {', '.join(_choices(flag))}" if metavar(flag) == "NAME" else ""
    same = r"off: ([^;]+); default: \1(?=$|[;,])"
    unit = re.sub(same, r"off: \1, the default", f"{flag.unit}{tail}")
    return f"{flag.text}{choices} [{unit}]".replace("%", "%%")


def _choices(flag: Flag) -> list[str]:
    listed = flag.rule.startswith("one of ")
    return flag.rule.removeprefix("one of ").partition(";")[0].split(",") if listed else []


def metavar(flag: Flag) -> str:
    """Return how --help writes a flag's value: its choices, or what it is."""
    choices = _choices(flag)
    if len(shown := "{" + ",".join(choices) + "}") <= 40 and choices:
        return shown
    kinds = {"int": "N", "flo": "X", "tex": "TEXT", "one": "NAME"}
    unit = flag.unit.partition(";")[0]
    is_place = flag.rule == "text" and unit in ("file", "directory")
    return unit.upper() if is_place else kinds.get(flag.rule[:3], "")


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
