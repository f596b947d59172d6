# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of text behind tokens, so that losses compare over tokenizers.

A token counts the bytes that it stands for, which may be a part of a character, and one that stands
for no text (the end of a document, an unknown character) counts none. So the counts of a document's
tokens add up to its size on disk, wherever it is cut into samples, if the vocabulary is of bytes or
falls back to them. A tokenizer that changes texts, or knows no token for some characters, counts
what its tokens say; a line says so.
"""

from collections.abc import Callable
from itertools import chain
from threading import Lock

import numpy as np

from training.data.batch import PAD, DocumentRules
from training.data.tokenizer import Tokenizer

# What tokenizers change or do not know: spaces, line ends, case, forms of characters, rare ones.
PROBES = ("x", "A  b\t\r\n\n c ", "\0\x7f", "e\u0301 \ufb01 \uff21", "\u65e5\u672c \U0001f600")


class TextBytes:
    """Count bytes by a table of the vocabulary, which is made when the first rows are counted.

    Where a tokenizer puts a space in front of a text, the first space after a token that begins or
    ends a document is no text. report: is told once where counts differ from the size of a text.
    """

    def __init__(self, tokenizer: Tokenizer, report: Callable[[str], None] = print) -> None:
        self._tokenizer, self._report, self._lock = tokenizer, report, Lock()
        self._sizes: np.ndarray | None = None

    def count(self, rows: np.ndarray, rules: DocumentRules) -> int:
        """Return the bytes of text of the labels whose loss counts; rows: int64 [b, s + 1]."""
        with self._lock:  # loader threads share this object
            if self._sizes is None:
                self._make()
        assert self._sizes is not None
        before, labels = rows[:, :-1], rows[:, 1:]
        sizes = self._sizes[labels]
        if self._spaced.any():
            sizes -= self._spaced[labels] & np.isin(before, self._ends)
        if rules.eod_mask_loss:
            sizes[before == rules.eod] = 0
        return int(sizes.sum())

    def _make(self) -> None:
        tokenizer = self._tokenizer
        texts, spaced = tokenizer.texts(), False
        if any(texts):
            words = (text.decode() for text in map(bytes.strip, texts) if text.isalnum())
            begins = (texts[i] for word in chain("x", words) for i in tokenizer.encode(word)[:1])
            spaced = next(filter(None, begins), b"").startswith(b" ")  # where the first is known
            self._try(texts, spaced)
        self._ends = [i for i in (tokenizer.bos, tokenizer.eod) if i is not None]
        self._spaced = np.array([spaced and t.startswith(b" ") for t in texts] + [False])
        self._sizes = np.array([len(text) for text in texts] + [0])  # the last one is PAD's
        assert PAD == -1

    def _try(self, texts: list[bytes], spaced: bool) -> None:
        for probe in PROBES:
            found = b"".join(texts[i] for i in self._tokenizer.encode(probe))[spaced:]
            if found != probe.encode():
                self._report(
                    f"bits per byte are approximate: {self._tokenizer.name} makes {found!r} of "
                    f"{probe.encode()!r}; a token counts the bytes that it stands for, and an "
                    "unknown one none"
                )
                return
