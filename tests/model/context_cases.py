# SPDX-License-Identifier: Apache-2.0
"""The matrix of context parallelism: its layouts, its documents, and the batches of both.

A row has 48 tokens, which the ranks' chunks never divide evenly. "documents" packs rows of a token
alone, of odd lengths, and of one document over all chunks; the loss counts no token of one
context-parallel rank, and two thirds of the others'.
"""

import functools
import itertools
from collections.abc import Iterator

import torch

from mpu.layers.attention.shards import shards
from mpu.pipeline.schedules import CHUNKS
from tests.model.twin import Twin

ROWS, S, LAYERS = 4, 48, 4
DOCUMENTS = ((1, 29, 7, 11), (47, 1), (48,), (13, 1, 1, 5, 3, 25))
COMM = ("p2p", "all_gather", "a2a")
PIPELINES = ((1, "1f1b"), (2, "1f1b"), (2, "zb-v"))
TENSOR = ((1, False), (2, False), (2, True))


def documents_batch(cp: int) -> dict[str, torch.Tensor]:
    """Return what a batch of documents has beside its tokens: positions, masks, whole rows."""
    g = torch.Generator().manual_seed(7)
    ids = [torch.repeat_interleave(torch.tensor(row)) for row in DOCUMENTS]
    places = [torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS]
    mask = torch.rand(ROWS, S, generator=g) > 1 / 3
    for row, lengths in zip(mask, DOCUMENTS, strict=True):
        for held in shards(cp, lengths)[cp - 1] if cp > 1 else ():
            row[held.start : held.stop] = False
    return {
        "document_ids": torch.stack(ids),
        "position_ids": torch.stack(places),
        "loss_mask": mask.float(),
    }


def case_of(
    cp: int,
    comm: str = "p2p",
    tp: tuple[int, bool] = (1, False),
    pp: tuple[int, str] = (1, "1f1b"),
    documents: bool = False,
    **more: object,
) -> dict:
    """Return a case for tests/model/twin.py; tp: its size, and whether sp; pp: size, schedule."""
    case = dict(
        cp=cp, comm=comm, tp=tp[0], sp=tp[1], pp=pp[0], dp=1, m=2, schedule=pp[1],
        v=CHUNKS[pp[1]], tied=False, recompute=None, layers=LAYERS, rows=ROWS, s=S, zero=0,
        bucket=3000, masks=documents,
    ) | more  # fmt: skip
    if documents:
        case["edit"] = documents_batch(cp)
    return case


def cases() -> Iterator[dict]:
    """Yield the matrix; what recomputes and whether the embeddings are tied go round."""
    again = itertools.cycle((None, "selective", "full"))
    tied = itertools.cycle((False, True, True, False, True))
    every = itertools.product((1, 2, 4), COMM, TENSOR, PIPELINES, (0, 1, 3), (False, True))
    for cp, comm, tp, pp, zero, documents in every:
        if cp == 1 and comm != "p2p":
            continue  # nothing is communicated
        for _ in range(1 if cp == 1 else 2):
            yield case_of(
                cp, comm, tp, pp, documents, zero=zero, gather=zero == 3, recompute=next(again),
                tied=next(tied),
            )  # fmt: skip


def world_of(case: dict) -> int:
    """Return how many ranks a case takes."""
    return case["tp"] * case["cp"] * case["pp"] * case["dp"]


@functools.cache
def _twin(tied: bool, documents: bool, cp: int, file: str) -> tuple[Twin, float, float]:
    case = case_of(cp, documents=documents)
    twin = Twin(tied, LAYERS, ROWS, file)
    (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, case=case)
    return twin, loss, norm


def twin_of(case: dict) -> tuple[Twin, float, float]:
    """Return the twin that has a case's gradients, its loss and its norm."""
    file = case.get("file", "model/llama.py")
    return _twin(case["tied"], "edit" in case, case["cp"] if "edit" in case else 1, file)


def worst(results: list[dict], twin: Twin, loss: float, norm: float) -> dict[str, float]:
    """Return the largest errors of a case: of the loss and the norm, relative, and of each
    gradient, max |difference| over max |gradient| of the parameter.
    """
    found, covered = {"loss": 0.0, "norm": 0.0, "gradient": 0.0}, dict.fromkeys(twin.w, 0)
    for result in results:
        found["loss"] = max(found["loss"], abs(result["losses"][0] - loss) / abs(loss))
        found["norm"] = max(found["norm"], abs(result["norms"][0] - norm) / norm)
        for name, dim, start, local in result["grads"]:
            full = twin.w[name].grad
            error = torch.from_numpy(local) - full.narrow(dim, start, local.shape[dim])
            found["gradient"] = max(found["gradient"], float(error.abs().max() / full.abs().max()))
            covered[name] += local.size
    missing = [name for name, count in covered.items() if count < twin.w[name].numel()]
    assert not missing, f"no rank has the gradient of {missing}"
    return found
