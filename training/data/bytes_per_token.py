# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of text of tokens, so that losses can be compared across tokenizers.

A token counts as the bytes of its text, which may be a part of a character; a token without text
(the end of a document, an unknown character) counts as none. So the counts of a document's tokens
add up to its size on disk, wherever it is cut into samples, if the vocabulary is byte-level or has
a byte fallback. If a tokenizer changes texts, or has no token for some characters, the bytes of its
tokens are counted, and a line reports this.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from threading import Lock

import numpy as np

from training.data.batch import DocumentRules
from training.data.token_texts import SPACE
from training.data.tokenizer import Tokenizer

UTF8_SPACE = SPACE.encode()
# Texts that tokenizers may change: spaces, line ends, case, forms of characters, rare characters.
PROBES = ("x", "A  b\t\r\n\n c ", "\0\x7f", "e\u0301 \ufb01 \uff21", "\u65e5\u672c \U0001f600")


class TextBytes:
    """Count bytes by a table of the vocabulary, which is made when the first rows are counted.

    If a tokenizer puts a space in front of a text, the first space after a token that begins or
    ends a document is not text. report: called once if counts may differ from a text's size.
    """

    def __init__(self, tokenizer: Tokenizer, report: Callable[[str], None] = print) -> None:
        self._tokenizer, self._report, self._lock = tokenizer, report, Lock()
        self._sizes: np.ndarray | None = None

    def count(
        self, rows: np.ndarray, rules: DocumentRules, counted: np.ndarray | None = None
    ) -> int:
        """Return the bytes of text of the labels whose loss counts; rows: int64 [b, s + 1].

        counted: as in make_batch. A text begins where it turns True, as a prompt and its answer
        are two texts.
        """
        with self._lock:  # loader threads share this object
            if self._sizes is None:
                self._sizes = self._make()
        before, labels = rows[:, :-1], rows[:, 1:]
        sizes = self._sizes[labels]
        if self._fronts.any():
            begins = np.isin(before, self._ends)
            if counted is not None:
                begins |= counted[:, 1:] & ~counted[:, :-1]
            sizes -= self._fronts[labels] & begins
        if self._bytes_of_space:
            first, second, third = self._bytes_of_space
            spaces = (before == second) & (labels == third)
            spaces[:, 1:] &= rows[:, :-2] == first  # unknown for a sample's first label
            sizes -= 2 * spaces
        if rules.eod_mask_loss:
            sizes[before == rules.eod] = 0
        if counted is not None:
            sizes[~counted[:, 1:]] = 0
        return int(sizes.sum())

    def _make(self) -> np.ndarray:
        """Return the number of bytes of each id, and a last 0, to which the index PAD points."""
        tokenizer, texts = self._tokenizer, self._tokenizer.texts()
        self._ends = [i for i in (tokenizer.bos, tokenizer.eod) if i is not None]
        self._fronts = np.zeros(len(texts) + 1, bool)  # tokens that begin with a space
        self._bytes_of_space: list[int] = []  # if there is no token for a space alone
        if any(texts):
            self._look(texts)
        return np.array([*map(len, texts), 0])

    def _look(self, texts: list[bytes]) -> None:
        """Detect how the tokenizer treats spaces, and report if it does not preserve texts."""

        def read(text: str) -> bytes:
            with suppress(ValueError):  # it may have no token for this text, not even "unknown"
                found = b"".join(texts[i] for i in self._tokenizer.encode(text))
                return found.replace(UTF8_SPACE, b" ") if self._bytes_of_space else found
            return b""

        if UTF8_SPACE in read("x x"):
            self._bytes_of_space = [texts.index(bytes([byte])) for byte in UTF8_SPACE]
        words = (text.decode() for text in map(bytes.strip, texts) if text.isalnum())
        fronted = next(filter(None, map(read, chain("x", words))), b"").startswith(b" ")
        if fronted:
            self._fronts[:-1] = [text.startswith(b" ") for text in texts]
        for probe in PROBES:
            if (found := read(probe)[fronted:]) != probe.encode():
                self._report(
                    "bits per byte count the bytes that tokens decode to, which may not be all of "
                    f"the text: {self._tokenizer.name} turns {probe.encode()!r} into {found!r}"
                )
                return
