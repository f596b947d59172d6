# SPDX-License-Identifier: Apache-2.0
"""Write docs/flags.md, the list of all flags, from the tables of the program.

    python -m tests.training.flags.flags_page

A test compares the page with the tables, so a flag that is added, changed or removed shows in the
page's diff: the list of flags is frozen there.
"""

from collections.abc import Iterator
from pathlib import Path

from training.flags import flag_table
from training.flags.help import effect, heading, of_group
from training.flags.megatron import known_flags, vocabulary
from training.settings.arguments import GROUPS

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"
HEAD = """# All flags

Made by `python -m tests.training.flags.flags_page`; a test compares it with the program.
The settings are declared in [arguments.py](../training/settings/arguments.py).
`python pretrain_llama.py --help` begins with the few flags that a first run needs, `--help GROUP`
prints a group of this page, and `--help FLAG` prints all that is known of a flag."""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_live(), *_others(), *_of_trees(), *_differences()]) + "\n"


def _live() -> Iterator[str]:
    """Yield a table of each group: the flag, its value, and what it does."""
    for group in GROUPS:
        yield from (
            "",
            f"## {heading(group)}",
            "",
            "| flag | what it does | value |",
            "|---|---|---|",
        )
        for flag in of_group(group):
            value = "" if flag.rule.nargs == 0 else f" {flag.rule.metavar}"
            name = f"`{_cell(flag.name + value)}`"
            yield f"| {name} | {_cell(effect(flag))} | {flag.rule.what} |"


def _others() -> Iterator[str]:
    """Yield the flags that do nothing of their own, by kind and reason."""
    titles = {
        flag_table.ACCEPTED_KIND: ("Megatron-LM's flags that are accepted as they stand", "why"),
        flag_table.REFUSED_KIND: (
            "Megatron-LM's flags that are refused",
            "why, and what to do instead",
        ),
        flag_table.REMOVED_KIND: ("Flags that earlier versions had", "what to do instead"),
    }
    for kind, (title, column) in titles.items():
        yield from ("", f"## {title}", "", f"| flags | {column} |", "|---|---|")
        rows: dict[str, list[str]] = {}
        for flag in known_flags().values():
            if flag.kind == kind:
                value = f" {' or '.join(flag.allowed)}" if flag.allowed else ""
                rows.setdefault(flag.text, []).append(f"`{flag.name}{value}`")
        yield from (f"| {', '.join(flags)} | {_cell(why)} |" for why, flags in rows.items())


def _differences() -> Iterator[str]:
    yield from ("", "## Where the same flag means something else", "",
                "| flag | Megatron-LM | here |", "|---|---|---|")  # fmt: skip
    for d in vocabulary().differences:
        yield f"| {_cell(d.title)} | {_cell(d.there)} | {_cell(d.here)} |"


def _of_trees() -> Iterator[str]:
    """Yield what flags of other programs are called here."""
    yield from ("", "## Flags of other programs that are obeyed", "",
                "| there | here |", "|---|---|")  # fmt: skip
    for name, words in vocabulary().same.items():
        if name not in known_flags():
            yield f"| `{name}` | `{' '.join(words)}` |"
    for (flag, value), here in vocabulary().values.items():
        yield f"| `{flag} {value}` | {f'`{chr(32).join(here)}`' if here else 'left out'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
