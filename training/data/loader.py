# SPDX-License-Identifier: Apache-2.0
"""Cut the global order of samples into micro-batches for each data-parallel rank.

A step consumes the next `global_batch_size` samples of the order 0, 1, 2, ... Micro-batch k of rank
r of D holds the b samples from consumed + (k D + r) b on; its context-parallel ranks hold a part of
each (training/data/context_part.py). So a run sees the same global batches whatever D, b and the
number of workers, and resumes from the number of consumed samples alone.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from training.data.batch import PAD, Batch, DocumentRules, make_batch
from training.data.bytes_per_token import TextBytes
from training.data.context_part import context_part
from training.data.dataset import DataError, Dataset
from training.data.workers import FIRST, Workers, wanted_workers

AHEAD = 4  # micro-batches prepared ahead, for each worker


class Loader:
    """Return this rank's micro-batches of each global batch.

    `workers` threads prefetch batches (file reads and copies release the GIL); with 0, batches are
    made on demand, and with None the number of threads is adapted to the measured read times and
    reported by `report`. An error in a worker is raised by the call that needs its batch. A batch
    that takes longer than `timeout` seconds (0: no limit) raises DataError. context: this rank
    among its context-parallel ranks, and their number. text: counts the bytes of text of each
    batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        *,
        vocab_size: int,
        rules: DocumentRules,
        workers: int | None = 0,
        context: tuple[int, int] = (0, 1),
        timeout: float = 0.0,
        report: Callable[[str], None] = lambda line: None,
        text: TextBytes | None = None,
    ) -> None:
        assert 0 <= dp_rank < dp_size
        self.dataset = dataset
        self._rows = micro_batch_size
        self._first_row = dp_rank * micro_batch_size
        self._stride = dp_size * micro_batch_size
        self._vocab_size = vocab_size
        self._rules = rules
        self._context = context
        self._workers = FIRST if workers is None else workers
        self._measured = workers is None
        self._timeout = timeout
        self._report = report
        self._text = text
        self._returned = 0.0  # when the last batch was handed out
        self._masked = 0  # global batches without a token that counts
        self._pool: Workers[Batch] | None = None
        self._ahead: deque[Future[Batch]] = deque()
        self._next = 0  # global sample at which the batch at the head of the queue begins

    def next_global_batch(self, consumed: int, global_batch_size: int) -> list[Batch]:
        """Return this rank's micro-batches of samples consumed to consumed + global_batch_size.

        `consumed` may be any number; consecutive global batches are read ahead.
        """
        if global_batch_size % self._stride or global_batch_size <= 0:
            raise ValueError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
                f"times data-parallel ranks, {self._rows} x {self._stride // self._rows}"
            )
        starts = range(consumed, consumed + global_batch_size, self._stride)
        batches = self._next_batches(consumed, starts)
        masked = self._rules.eod_mask_loss or self.dataset.masked
        if masked and not any(batch.token_count for batch in batches):
            self._tell_masked(consumed, global_batch_size)
        return batches

    def _next_batches(self, consumed: int, starts: range) -> list[Batch]:
        """Return this rank's micro-batches that start at these samples."""
        if self._workers == 0 and not self._timeout:
            return [self._make(start) for start in starts]
        if consumed != self._next:
            self.close()
            self._next = consumed
        elif self._measured and self._returned:
            self._measure(len(starts), time.perf_counter() - self._returned)
        self._read_ahead(len(starts) + AHEAD * self._workers)
        try:
            batches = [self._wait(self._ahead.popleft()) for _ in starts]
        except BaseException:
            self.close()
            raise
        self._next += len(starts) * self._stride
        self._returned = time.perf_counter()
        return batches

    def _tell_masked(self, consumed: int, size: int) -> None:
        """Report the 1st, 2nd, 4th, 8th, ... global batch without a token that counts in the loss.

        This rank's part has none; the parts of the other ranks are read to check them.
        """
        for i in range(consumed, consumed + size):
            rows, counted = self._samples(range(i, i + 1))
            if make_batch(rows, self._rules, i, counted).token_count:
                return
        self._masked += 1
        if self._masked & (self._masked - 1) == 0:
            more = f"; it is the {self._masked}th such batch" if self._masked > 2 else ""
            why = ["--eod-mask-loss"] * self._rules.eod_mask_loss
            why += ["the loss mask"] * self.dataset.masked
            leaves = "leave" if len(why) > 1 else "leaves"
            self._report(
                f"data: {' and '.join(why)} {leaves} no token of samples {consumed} to "
                f"{consumed + size - 1} in the loss, so the loss of this batch is 0 and so are its "
                f"gradients; the first is {self.dataset.describe(consumed)}{more}"
            )

    def _wait(self, ahead: Future[Batch]) -> Batch:
        """Return a prefetched batch. Raises DataError, with file and byte, after the timeout."""
        try:
            return ahead.result(self._timeout or None)
        except TimeoutError:
            at = self.dataset.under_way() or f"samples from {self._next} on"
            raise DataError(
                f"{at}: not read within {self._timeout:g} seconds (--data-timeout); the file "
                "system may hang"
            ) from None

    def _measure(self, reads: int, step_seconds: float) -> None:
        """Start more threads if `reads` micro-batches take longer than a step."""
        assert self._pool is not None
        seconds, before = self._pool.seconds, self._workers
        wanted = wanted_workers(seconds, reads, step_seconds) if seconds else before
        if wanted > before:
            self._workers = wanted
            self._pool.grow(wanted)
            self._report(
                f"data: {wanted} threads read ahead, not {before}: a micro-batch takes "
                f"{seconds * 1e3:.1f} ms to read, and a step of {reads} takes "
                f"{step_seconds * 1e3:.1f} ms"
            )

    def global_batches(self, count: int, global_batch_size: int) -> Iterator[list[Batch]]:
        """Yield the first `count` global batches, the same in every evaluation.

        If the dataset is not endless, yield all of them; the last one is padded with tokens that
        do not count in the loss.
        """
        if (length := self.dataset.length) is not None:
            count = -(-length // global_batch_size)
        for k in range(count):
            yield self.next_global_batch(k * global_batch_size, global_batch_size)
        self.close()  # what was read ahead: the next evaluation begins at sample 0

    def close(self) -> None:
        """Stop reading ahead; the loader may be used again."""
        for ahead in self._ahead:
            ahead.cancel()
        if self._pool is not None:
            self._pool.close()
        self._pool, self._returned = None, 0.0
        self._ahead.clear()
        self._next = -1

    def _read_ahead(self, depth: int) -> None:
        if self._pool is None:
            self._pool = Workers(self._make, max(1, self._workers))
        while len(self._ahead) < depth:
            start = self._next + len(self._ahead) * self._stride
            self._ahead.append(self._pool.submit(start))

    def _make(self, start: int) -> Batch:
        """Return this rank's rows of the D micro-batches that start at sample `start`.

        Raises DataError for a token outside of the vocabulary.
        """
        first = start + self._first_row
        rows, counted = self._samples(range(first, first + self._rows))
        least = 0 if self.dataset.length is None else PAD
        if rows.min() < least or rows.max() >= self._vocab_size:
            bad = int(np.argmax(((rows < least) | (rows >= self._vocab_size)).any(axis=1)))
            worst = rows[bad].min() if rows[bad].min() < least else rows[bad].max()
            raise DataError(
                f"{self.dataset.describe(first + bad)}: token id {worst} is outside of the "
                f"vocabulary of {self._vocab_size}; was the file made with this tokenizer?"
            )
        batch = make_batch(rows, self._rules, first, counted)
        if self._text is not None:
            batch = replace(batch, text_bytes=self._text.count(rows, self._rules, counted))
        return context_part(batch, *self._context)

    def _samples(self, which: range) -> tuple[np.ndarray, np.ndarray | None]:
        """Return samples, int64 [b, s + 1], and for masked data which of their tokens count."""
        rows = np.stack([self.dataset.sample(i) for i in which])
        if not self.dataset.masked:
            return rows, None
        return rows, np.stack([self.dataset.loss_mask(i) for i in which])
