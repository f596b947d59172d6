# SPDX-License-Identifier: Apache-2.0
"""Read megatron.txt: the flags of Megatron-LM that are not live here, and what differs."""

from pathlib import Path

SOURCE = "training/flags/megatron.txt"


def sections_of(table: str) -> dict[str, list[str]]:
    """Return {heading: lines} of a table in this folder, without remarks and empty lines."""
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            lines = sections[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            lines.append(line)
    return sections


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def _idle(lines: list[str]) -> list[list[str]]:
    """Return the rows of `ACCEPTED` for flags of features that are not available here."""
    out, needs = list[list[str]](), ""
    for line in lines:
        if not line.startswith("    "):
            needs = line
            continue
        for word in line.split():
            name, _, count = word.partition(":")
            rule = {"": "value", "0": "switch", "*": "values"}[count]
            why = f"belongs to {needs}, without which it changes nothing, there as here"
            out.append([name, rule, "any", why])
    return out


def _refused(lines: list[str]) -> dict[str, str]:
    """Return {flag: kind of feature, and what to do instead}."""
    out, why = dict[str, str](), ""
    for line in lines:
        if line.startswith("    "):
            out |= dict.fromkeys(line.split(), why)
        else:
            kind, instead = cells(line)
            why = f"{kind} is not available here" + f"; {instead}" * bool(instead)
    return out


_TABLE = sections_of("megatron.txt")
# flags, values, allowed ones, why
ACCEPTED = [cells(line) for line in _TABLE["accepted"]] + _idle(_TABLE["idle"])
REFUSED = _refused(_TABLE["refused"])  # {flag: why}
DIFFERENCES = [cells(line) for line in _TABLE["differences"]]  # flag, Megatron-LM, here
