# SPDX-License-Identifier: Apache-2.0
"""Write the report of a comparison of two runs as a page."""

from collections.abc import Mapping
from typing import Any


def page(found: Mapping[str, Any], a: str, b: str) -> str:
    """Return the page: Markdown."""
    lines = ["# Where two runs differ first", "", found["sentence"], ""]
    lines += ["| | |", "|---|---|", f"| A | `{a}` |", f"| B | `{b or 'the flags of A'}` |"]
    step, verdict = found["step"], found["verdict"]
    if step is not None:
        lines.append(f"| first step that differs | {step['iteration']}: {step['text']} |")
        lines.append(f"| last step known to be equal | {step['between']} |")
        if len(step["names"]) > 1:
            lines.append(f"| tensors that differ then | {', '.join(step['names'][:20])} |")
    if found["start"]:
        lines.append(f"| both replayed it from | {found['start']} |")
    if verdict is not None and not verdict["same"]:
        shown = ("name", "module", "what", "phase", "kind", "site", "error")
        lines += [f"| {name} | {verdict[name]} |" for name in shown if verdict[name]]
    if verdict is not None:
        lines.append(f"| tensors compared | {verdict['compared']:,} |")
    for name, (one, other) in found["settings"].items():
        lines.append(f"| {name} | `{one}` and `{other}` |")
    lines += ["", *[f"- {note}" for note in found["notes"]]]
    return "\n".join(lines).rstrip() + "\n"
