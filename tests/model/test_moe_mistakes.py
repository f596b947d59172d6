# SPDX-License-Identifier: Apache-2.0
"""The mistakes that mixtures of experts have elsewhere, planted one by one: each is caught.

By the serial twin, with fresh memory that is NaN: a loss, a norm or a gradient differs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import mpu.zero.norm as norm_file
from model import moe
from mpu.layers import dispatch, experts
from mpu.layers.dispatch import AllGather, Dispatcher
from mpu.layers.experts import GroupedLinear
from mpu.param import Placement
from mpu.recompute import Decisions
from tests.model.moe_twin import ExpertTwin
from tests.model.test_moe_parity import BASE, KINDS, run_cases
from tests.model.twin import check

Patches = tuple[Any, str, Any]
CASE = BASE | dict(dp=2, ep=2, sp=False, layers=3, moe=KINDS["mixtral"])
CUT = BASE | dict(tp=2, sp=True, ep=2, layers=3, moe=KINDS["sigmoid, shared"])


def scaled(self: GroupedLinear, x: Any, dy: Any, counts: Any) -> None:
    real_wgrad(self, x, dy * self.ctx.grid.ep.size, counts)


def left_unwritten(self: GroupedLinear, x: Any, dy: Any, counts: Any) -> None:
    main, fresh = self.ctx.sink.grad_slot(self.weight)
    grads = main.view(-1, self.out_features, self.in_features)
    for e, low, high in experts.runs(counts):
        if high > low:
            experts.RECIPE.accumulate(grads[e], fresh, x[low:high], dy[low:high])
    self.ctx.sink.register_grad_ready(self.weight)


def detached(self: AllGather, rows: Any, weights: Any, plan: Any) -> Any:
    return real_combine(self, rows, weights.detach(), plan)


def own_tokens_only(self: Any, choice: Any, sequences: int) -> Any:
    t, e = len(choice), self.config.num_experts
    keys = ((torch.arange(t) % sequences)[:, None] * e + choice).flatten()
    return torch.bincount(keys, minlength=sequences * e).view(sequences, e)


def one_rank_s(self: Any, logits: Any, scores: Any, counted: Any) -> Any:
    total = real_losses(self, logits, scores, counted)
    return None if total is None else total * self.ctx.tp.size


def chosen_again(self: Decisions, decide: Callable[[], Any]) -> Any:
    """Recomputation decides from other scores, as on a device that adds in another order."""
    if self._again is None:
        return real_keep(self, decide)
    next(self._again)
    with patch.object(moe.SparseMLP, "choose", lambda self, s: real_choose(self, s).roll(1, 0)):
        return decide()


def tail_read(rows: Any, place: Any, dtype: Any, padded: bool = False) -> Iterator[Any]:
    """Rows past the last one are read from whatever memory is there."""
    padded = torch.cat([rows, rows.new_empty((1, *rows.shape[1:]))])
    for at in place.unbind(1):
        yield padded.index_select(0, at.clamp(max=len(rows))).to(dtype)


def first_rank_s(self: Placement, names: Any) -> Any:
    found = real_pieces(self, names)
    if not self.whole_sections:
        return found
    run = len(names) // self.axis.size
    return [replace(piece, name=names[i % run]) for i, piece in enumerate(found)]


def norm_without(self: Any, tensors: Any) -> Any:
    found = real_squares(self, tensors)
    return found if self.cut.name != "ep" else found * (1.0 / self.cut.size)


def not_normalised(self: Any, scores: Any, choice: Any) -> Any:
    return scores.softmax(1).gather(1, choice)


def by_one(self: Any, x: Any, plan: Any) -> Any:
    """The experts' bounds are one row off."""
    return real_rows(self, x, plan).roll(1, 0)


real_wgrad, real_combine = GroupedLinear.wgrad, AllGather.combine
real_losses, real_choose = moe.SparseMLP.losses, moe.SparseMLP.choose
real_keep, real_pieces = Decisions.record, Placement.pieces
real_squares, real_rows = norm_file._Part.squares, Dispatcher.rows
MISTAKES: dict[str, tuple[dict[str, Any], Patches]] = {
    "gradients of experts times ep": (CASE, (GroupedLinear, "wgrad", scaled)),
    "the norm omits experts": (CASE, (norm_file._Part, "squares", norm_without)),
    "the router's gradient is detached by a gather": (CASE, (AllGather, "combine", detached)),
    "the balance loss counts this rank's tokens only": (
        CUT, (moe.SparseMLP, "count", own_tokens_only)),
    "the balance loss is scaled by tp": (CUT, (moe.SparseMLP, "losses", one_rank_s)),
    "an expert without tokens has no gradient": (
        CASE | dict(moe=CASE["moe"] | dict(num_experts=64)),
        (GroupedLinear, "wgrad", left_unwritten)),
    "rows past the last one are read": (CASE, (dispatch, "_parts", tail_read)),
    "recomputation chooses again": (
        CASE | dict(recompute="full"), (Decisions, "record", chosen_again)),
    "every rank of ep saves the first rank's experts": (CASE, (Placement, "pieces", first_rank_s)),
    "weights are not normalised": (CASE, (moe.SparseMLP, "weights", not_normalised)),
    "rows reach another expert": (CASE, (Dispatcher, "rows", by_one)),
}  # fmt: skip


@contextmanager
def planted(name: str) -> Iterator[None]:
    target, attribute, wrong = MISTAKES[name][1]
    with patch.object(target, attribute, wrong):
        yield


def run_planted(comm: Any, names: list[str | None]) -> list[Any]:
    found = []
    for name in names:
        case = MISTAKES[name][0] if name in MISTAKES else CASE
        if name is None:
            found.append(run_cases(comm, [case], 2)[0])
            continue
        try:
            with planted(name):
                found.append(run_cases(comm, [case], 2)[0])
        except AssertionError:  # on all ranks: the norm is not finite
            found.append(None)
    return found


@pytest.mark.prove
def test_each_mistake_is_caught(world: Any) -> None:
    names = [None, *MISTAKES]
    results = world(2).run(run_planted, names)
    passed = []
    for i, name in enumerate(names):
        case = MISTAKES[name][0] if name in MISTAKES else CASE
        twin = ExpertTwin(case["moe"], case["rows"] // case["dp"], layers=3)
        (loss, _), (norm, _) = twin.train(2, 0.0, 0.0)  # the second step has the first's memory
        if results[0][i] is None:
            continue
        try:
            check([ranks[i] for ranks in results], twin, loss, norm)
            passed.append(name)
        except AssertionError:
            pass
    assert passed == [None], "a mistake was not noticed"


def test_a_tie_goes_to_the_lower_number() -> None:
    """As torch.topk does not promise."""

    class Layer:
        config = moe.MoEConfig(100, 16, 16, 2, 2, 2, num_experts=8, moe_router_topk=3)
        ctx = type("ctx", (), {"experts": type("o", (), {"force_balance": False})})

    scores = torch.tensor([[1.0, 2, 2, 0, 2, 2, 1, 2], [0.0] * 8])
    chosen = moe.SparseMLP.choose(Layer, scores)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
