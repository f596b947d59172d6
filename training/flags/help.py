# SPDX-License-Identifier: Apache-2.0
"""Write --help from the table of settings: where to start, the flags of a group, or one flag."""

import textwrap
from collections.abc import Collection
from typing import NamedTuple

from training.flags import flag_table
from training.flags.flag_table import Flag, live_flags
from training.flags.foreign import instead, like, refuse_unknown
from training.flags.megatron import known_flags, vocabulary
from training.settings.arguments import GROUPS
from training.settings.config import UsageError

ALL = "all"
TITLE = "Pretrain a Llama. Flags have Megatron-LM's names and meanings."
WIDTH = 78  # of a line
NOT_GIVEN = "left out"  # how Setting.off begins where leaving the flag out has that effect


class Page(NamedTuple):
    """One page of --help: the text above its flags, the flags, and the text below."""

    text: str
    flags: dict[str, str]  # {flag: heading}
    below: str = ""


def page_of(word: str, own_names: Collection[str] = ()) -> Page:
    """Return the page of --help WORD; "" is --help alone. own_names: flags of a fork.

    Raises UsageError if there is no group and no flag of this name.
    """
    if not word:
        return START
    if word == ALL:
        return Page(
            TITLE, {flag.name: heading(flag.group) for flag in live_flags().values()}, _others()
        )
    if word in GROUPS:
        return Page("", {flag.name: heading(word) for flag in of_group(word)})
    name, same = "--" + word.lstrip("-"), vocabulary().same
    if name not in {*own_names, *known_flags()}:
        name = name.replace("_", "-")
    if name in own_names:
        return Page("", {})
    if name in known_flags():
        return _one(known_flags()[name])
    if name in same:
        return Page(f"{name} is taken as {' '.join(same[name])}", {})
    if word.startswith("--") or instead(name):
        refuse_unknown("--" + word.lstrip("-"))
    close = like(word, [*GROUPS, ALL]) or like(name, list(known_flags()))
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(
        f"--help {word}: there is no group and no flag of this name; the groups are "
        f"{', '.join(GROUPS)} and {ALL}{meant}"
    )


def heading(group: str) -> str:
    """Return the heading of a group of flags, with the first line of its dataclass's docstring."""
    lines = (GROUPS[group][0].__doc__ or "").splitlines()
    return f"{group}: {lines[0].rstrip('.')}"


def of_group(group: str) -> list[Flag]:
    """Return the live flags of a group."""
    return [flag for flag in live_flags().values() if flag.group == group]


def effect(flag: Flag) -> str:
    """Return the help of a live flag, with its unit, off-value, default and needs in brackets."""
    choices = f"; {flag.rule.what}" * (flag.rule.metavar == "NAME")
    ours = " (ours, not Megatron's)" if flag.row.ours else ""
    facts = "; ".join(_facts(flag))
    return f"{flag.text}{choices}{ours}" + f" [{facts}]" * bool(facts)


def _facts(flag: Flag) -> list[str]:
    """Return the unit of a flag, its off-value, its default and the flags that it needs."""
    row = flag.row
    none = row.default is None or row.default is False or row.default == ()
    default = row.derived or ("" if none else _show(row.default))
    off = row.off or ""
    if off.startswith(f"{NOT_GIVEN}, "):
        off = off.removeprefix(f"{NOT_GIVEN}, ")
        if off.startswith("with "):
            return [row.unit, f"not {off}"]
        default, off = off, ""
    elif off.startswith(f"{NOT_GIVEN} or "):
        off = off.removeprefix(f"{NOT_GIVEN} or ")
        default = default or off.partition(",")[0]
    out = [row.unit] * bool(row.unit) + ["required"] * row.required
    if off and off.partition(",")[0] == default:
        out.append(f"off: {off}, the default")
    else:
        out += [f"off: {off}"] * bool(off)
        out += [f"default: {default}"] * bool(default and not row.required)
    out += [f"without a value: {row.rule.bare}"] * bool(row.rule.bare)
    value = f" {row.needs_value}" if row.needs_value else ""
    return out + [f"with {' or '.join(row.needs)}{value}"] * bool(row.needs)


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _start() -> Page:
    """Return the page of --help alone: the flags to start with, and the groups."""
    lines = ["groups:"]
    for group in GROUPS:
        name, about = heading(group).split(": ", 1)
        lines.append(f"  {name:14}{len(of_group(group)):3} flags  {about}")
    lines += [
        "",
        "  --help GROUP       lists the flags of a group",
        "  --help FLAG        explains a flag, also one that is not available here",
        f"  --help {ALL}         lists all flags, as docs/flags.md does",
    ]
    start = {flag.name: "start here" for flag in live_flags().values() if flag.row.start}
    return Page(TITLE, start, "\n".join(lines))


def _others() -> str:
    kinds = [flag.kind for flag in known_flags().values()]
    return textwrap.fill(
        f"{kinds.count(flag_table.ACCEPTED_KIND)} more of Megatron-LM's flags are accepted as they "
        f"stand and {kinds.count(flag_table.REFUSED_KIND)} are refused with the reason: "
        "docs/flags.md lists them all.", WIDTH,
    )  # fmt: skip


def _one(flag: Flag) -> Page:
    """Return the page of one flag."""
    lines = list[str]()
    if flag.kind != flag_table.LIVE_KIND:
        values = f", {' or '.join(flag.allowed) or 'with any value'}" * (flag.rule.nargs != 0)
        does = {
            flag_table.ACCEPTED_KIND: f"is accepted{values}",
            flag_table.REFUSED_KIND: "is refused",
            flag_table.REMOVED_KIND: "was removed",
        }
        lines.append(f"{flag.name} {does[flag.kind]}: {flag.text}")
    other = [*flag.row.excludes]
    other += [each.name for each in live_flags().values() if flag.name in each.row.excludes]
    lines += [f"Value: {flag.rule.what}"] * bool(flag.rule.what)
    also = [each.name for each in known_flags().values() if each.alias_of == (flag.name,)]
    lines += [f"Other names: {', '.join(also)}"] * bool(also)
    lines += [f"Not together with {', '.join(other)}"] * bool(other)
    for stop in flag.row.stops:
        names = (each.split()[0] for each in stop.when.split(" & "))
        lines.append(stop.sentence.format(*(live_flags()[name].rule.metavar for name in names)))
    for differs in vocabulary().differences:
        if flag.name in differs.flags.split():
            text = f"in Megatron-LM {differs.there}; here {differs.here}"
            lines.append(f"{differs.title}: {text}")
    live = [flag] if flag.kind == flag_table.LIVE_KIND else []
    named = [known_flags()[word] for word in flag.alias_of if word.startswith("--")]
    shown = {each.name: heading(each.group) for each in (*live, *named)}
    return Page("", shown, "\n".join(textwrap.fill(line, WIDTH) for line in lines))


START = _start()
