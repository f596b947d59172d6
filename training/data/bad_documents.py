# SPDX-License-Identifier: Apache-2.0
"""Leave out and count documents that cannot be trained on, or refuse the first of them."""

from collections.abc import Callable, Mapping

POLICIES = ("skip", "error")  # of --on-bad-document


class BadDocuments:
    """The policy of --on-bad-document, and the counts of documents that were left out.

    "skip" leaves out and counts all, "error" refuses the first. None, if the flag is left out,
    leaves out empty ones and refuses others.
    """

    def __init__(self, policy: str | None = None, skip: str = "--on-bad-document skip") -> None:
        """policy: --on-bad-document. skip: how a user asks for "skip", printed in a refusal."""
        self.policy, self.skip = policy, skip
        self.kinds: dict[str, tuple[int, str]] = {}  # {kind: (how many, where the first is)}

    def found(self, kind: str, place: Callable[[], str], why: str) -> None:
        """Count a document, or raise ValueError with its place. place(): may read the file."""
        if self.policy == "error" or (self.policy is None and kind != "empty"):
            hint = "" if self.policy else f"; {self.skip} leaves such documents out"
            raise ValueError(f"{place()}: {why}{hint}")
        count, first = self.kinds.get(kind) or (0, place())
        self.kinds[kind] = (count + 1, first)

    def add(self, kinds: Mapping[str, tuple[int, str]]) -> None:
        """Add the counts of the next part of the same files."""
        for kind, (count, first) in kinds.items():
            before, at = self.kinds.get(kind, (0, first))
            self.kinds[kind] = (before + count, at)

    def line(self) -> str:
        """Return a sentence on the documents that were left out, or ""."""
        total = sum(count for count, _ in self.kinds.values())
        return f"{total:,} document(s) left out: {listed(self.kinds)}" if total else ""


def listed(kinds: Mapping[str, tuple[int, str]]) -> str:
    """Return {kind: (how many, the first)} in words."""
    each = [f"{count:,} {kind} (first: {first})" for kind, (count, first) in kinds.items()]
    return ", ".join(each)
