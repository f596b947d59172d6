# SPDX-License-Identifier: Apache-2.0
"""Which parameters are frozen, that is have `requires_grad` False, on all ranks.

A model freezes a parameter by `weight.requires_grad_(False)` when it creates it. A rank only has
its own stages of a pipeline; the information about all stages (where backward ends, the record in a
checkpoint) is gathered here, once.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import nn

from mpu.comm.collectives import gather_bytes
from mpu.grid import Grid
from mpu.param import PlacementError, placement_of


class Frozen(NamedTuple):
    """The frozen parameters of the whole model.

    names: of parameters of all stages, sorted; tied ones by their name on the first stage.
    trained: (pipeline rank, chunk) of each stage in which a parameter trains. overruled: names of
    tied parameters whose requires_grad on the last stage differs from that on the first.
    """

    names: tuple[str, ...] = ()
    trained: frozenset[tuple[int, int]] = frozenset()
    overruled: tuple[str, ...] = ()


def agree(
    params: Mapping[str, nn.Parameter],
    chunk_of: Callable[[str], int],
    grid: Grid,
    device: torch.device,
) -> Frozen:
    """Return the frozen parameters; for tied embeddings the first stage decides. Collective.

    Without a pipeline, a loop over a model's parameters yields tied embeddings by the name on the
    first stage, so that name is used with a pipeline too. Raises PlacementError if nothing trains,
    or if ranks do not freeze the same parameters of a stage.
    """
    tied = [name for name, param in params.items() if placement_of(param).copies]
    found = {name: [chunk_of(name), not param.requires_grad] for name, param in params.items()}
    chunks = {chunk for name, (chunk, frozen) in found.items() if not frozen and name not in tied}
    own = {
        "rank": grid.pp.rank,
        "frozen": [name for name, (_, frozen) in found.items() if frozen],
        "trained": sorted(chunks),  # chunks; tied parameters do not count yet
        "tied": {name: found[name] for name in tied},
    }
    every = [json.loads(text) for text in gather_bytes(json.dumps(own).encode(), grid.pp, device)]
    names, trained, overruled = set[str](), set[tuple[int, int]](), set[str]()
    decided = [frozen for _, frozen in every[0]["tied"].values()]
    for rank in every:
        of_rank = set(rank["frozen"])
        for (name, (chunk, own_word)), frozen in zip(rank["tied"].items(), decided, strict=False):
            of_rank.discard(name)
            overruled |= {name} if own_word != frozen else set()
            if frozen:
                of_rank.add(name)
            else:
                rank["trained"].append(chunk)
        copies = rank["tied"].keys() if rank is not every[0] else ()
        names |= of_rank.difference(copies)
        trained |= {(rank["rank"], chunk) for chunk in rank["trained"]}
    for name, frozen in zip(tied, decided, strict=False):
        params[name].requires_grad_(not frozen)
    if not trained and len({rank["rank"] for rank in every}) == grid.pp.size:
        raise PlacementError(
            f"all {len(names)} parameters of the model are frozen (requires_grad is False), so "
            "nothing would train"
        )
    digest = sha256("\n".join(sorted(names)).encode()).digest()
    if len({*gather_bytes(digest, grid.world, device)}) > 1:
        raise PlacementError(
            "the ranks do not freeze the same parameters: requires_grad_(False) must not depend on "
            "the rank (docs/forking.md)"
        )
    return Frozen(tuple(sorted(names)), frozenset(trained), tuple(sorted(overruled)))
