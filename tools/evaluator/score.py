# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of continuations, tensor-parallel in a replica and divided among replicas.

Every rank gets the same requests. Replica i of n computes every n-th batch, and all ranks return
all results. Ranks of tp gather only the logits of the requested positions.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model.llama import Llama
from mpu.comm.collectives import all_gather
from mpu.comm.transport import Axis
from mpu.grid import Grid
from training.checkpoint.agree import first_error, together
from training.run.waiting import Progress

Row = tuple[Sequence[int], Sequence[int]]  # ids of a context, at least one, and of a continuation
POSITIONS = 512  # whose logits over the whole vocabulary are computed at once


class Scorer:
    """Score rows of tokens by a model.

    grid: of tp x dp ranks. batch_size: rows a forward. max_length: tokens that a forward takes; of
    a longer row the first tokens are left out. progress: counts the rows.
    """

    def __init__(
        self,
        model: Llama,
        grid: Grid,
        batch_size: int,
        max_length: int,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.model, self.grid = model, grid
        self.batch_size, self.max_length = batch_size, max_length
        self.device = model.ctx.device

    def log_likelihoods(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return for each row the sum of ln p(token) of its continuation, in nats, and whether each
        of these tokens is the likeliest at its place.

        Raises ValueError for a continuation longer than max_length, for a row without a context,
        and where the ranks were given different rows.
        """
        for context, continuation in rows:
            if not context:
                raise ValueError("a row needs at least one token before its continuation")
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is longer than the model's "
                    f"{self.max_length} (--max-length)"
                )
        self.compare(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]) - len(rows[i][1]))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

        def of(batch: Sequence[int]) -> list[Any]:
            return list(zip(batch, self._batch([rows[i] for i in batch]), strict=True))

        self.progress.begin("scoring batches:", len(batches))
        found = dict(pair for done in self.share(batches, of) for pair in done)
        return [(found[i][0], bool(found[i][1])) for i in range(len(rows))]

    def share(self, work: Sequence[Any], of: Callable[[Any], Any]) -> list[Any]:
        """Return of(each) for all work, in order; each of n replicas computes every n-th item.

        The results of `of` are sent as JSON. Raises ValueError, on all ranks, if it fails.
        """
        dp = self.grid.dp

        def counted(each: Any) -> Any:
            done = of(each)
            self.progress.add(dp.size)  # the others have done about as much
            return done

        outcomes = together(
            lambda: [counted(each) for each in work[dp.rank :: dp.size]], dp, self._at(dp)
        )
        self.progress.begin("")
        failed = first_error(outcomes)
        if failed is not None:
            raise ValueError(failed.error)
        done = [outcome.value for outcome in outcomes]
        return [done[i % dp.size][i // dp.size] for i in range(len(work))]

    def compare(self, requests: Any) -> None:
        """Raise ValueError, on all ranks, if their requests differ."""
        digest = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
        every = together(lambda: digest, self.grid.world, self._at(self.grid.world))
        if len({outcome.value for outcome in every}) > 1:
            raise ValueError(
                "the ranks built different requests: a task draws its examples at random, or reads "
                "other data on another host"
            )

    def _at(self, axis: Axis) -> torch.device | None:
        return self.device if axis.size > 1 else None

    @torch.inference_mode()
    def _batch(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        requests = [
            ([*context, *continuation][-self.max_length - 1 : -1], list(continuation))
            for context, continuation in rows
        ]
        length = max(1, *(len(given) for given, _ in requests))
        tokens = torch.zeros(len(rows), length, dtype=torch.long)  # [b, n]; 0 after a row's end
        for i, (given, _) in enumerate(requests):
            tokens[i, : len(given)] = torch.tensor(given)
        logits = self.model(tokens.to(self.device))  # [n, b, V/t]
        targets = torch.cat(
            [
                logits[len(given) - len(new) : len(given), i]
                for i, (given, new) in enumerate(requests)
            ]
        )  # [p, V/t]: the places of which the next token is requested
        ids = torch.tensor([i for _, new in requests for i in new], device=self.device)  # [p]
        parts = [
            self._of_places(targets[at : at + POSITIONS], ids[at : at + POSITIONS])
            for at in range(0, len(ids), POSITIONS)
        ]
        values = torch.cat([value for value, _ in parts] or [ids.double()]).split(
            [len(new) for _, new in requests]
        )
        likeliest = torch.cat([best for _, best in parts] or [ids.bool()]).split(
            [len(new) for _, new in requests]
        )
        return [
            (value.sum().item(), bool(best.all()))
            for value, best in zip(values, likeliest, strict=True)
        ]

    def _of_places(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """logits [p, V/t], ids [p] -> ln p(id) in fp64 [p], and whether it is the largest [p]."""
        vocab_size = self.model.config.vocab_size
        full = all_gather(logits.t().contiguous(), self.grid.tp)[0].t()[:, :vocab_size]  # [p, V]
        value = full.to(torch.float64 if full.dtype == torch.float64 else torch.float32)
        value = value.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        return value.double(), full.argmax(-1) == ids
