# SPDX-License-Identifier: Apache-2.0
"""QK-clip is the same on every layout: held to a serial twin, which clips in each step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pretrain_llama
from tests.model.twin import Twin, run_cases, same_bits

CLIP = dict(qk_clip=True, qk_clip_alpha=0.3, qk_clip_threshold=0.4)
BASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=False, m=1, rows=8, lr=1e-2, clip=0.0)
BASE |= dict(muon=CLIP, s=16)
STEPS = 3
TWO = dict(sizes=dict(num_query_groups=2))
# documents reach over the parts of every rank
PACKED = dict(masks=True)
LAYOUTS = {
    "tp4, 2 heads, each on 2 ranks": dict(tp=4, sp=True, zero=1) | TWO,
    "cp ring, packed": dict(cp=2, dp=2, zero=3) | PACKED,
    "pp2, offload": dict(pp=2, dp=2, zero=1, m=2, offload=True, layers=4),
}
MORE = {
    "tp4": dict(tp=4, sp=False),
    "cp all-gather": dict(cp=4, comm="all_gather"),
    "cp a2a on 4, packed": dict(cp=4, comm="a2a") | PACKED,
    "pp4 zb-v, selective": dict(pp=4, m=4, schedule="zb-v", v=2, layers=8, recompute="selective"),
    "tp2 pp2, full": dict(tp=2, sp=True, pp=2, m=2, layers=4, recompute="full"),
    "tp2, 1 head": dict(tp=2, dp=2, sp=True, zero=2) | dict(sizes=dict(num_query_groups=1)),
}


@pytest.mark.parametrize("more", ["", "--num-experts 2 --moe-router-topk 2"])
def test_a_run_of_a_model_with_norms_of_queries_is_refused(more: str, capsys: Any) -> None:
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-2"
    run = f"{flags} --device cpu --mock-data --vocab-size 64 --train-iters 1 --qk-layernorm {more}"
    assert pretrain_llama.main([*run.split(), "--qk-clip"]) == 2
    assert "--qk-clip: this model normalises queries and keys" in capsys.readouterr().err


class Clipping(Twin):
    """Notes the largest scores of each head, and clips after each update."""

    def scores(self, scores: torch.Tensor, layer: int) -> torch.Tensor:
        self.tops[layer] = scores.detach().amax((0, 2, 3))
        return scores

    def clip(self) -> int:
        count, groups = 0, self.sizes["num_query_groups"]
        for layer, tops in self.tops.items():
            for g, some in enumerate(tops.view(groups, -1)):
                if (top := some.max()) <= CLIP["qk_clip_threshold"]:
                    continue
                count, eta = count + 1, CLIP["qk_clip_threshold"] / top
                for name, n, power in (("q", len(some), 0.3), ("k", 1, 0.7)):
                    weight = self.w[f"model.layers.{layer}.self_attn.{name}_proj.weight"].data
                    rows = n * self.sizes["kv_channels"]
                    weight[g * rows : (g + 1) * rows] *= eta**power
        return count


def twin_of(case: dict[str, Any]) -> tuple[Clipping, list[float], int]:
    """Return the twin after the steps, its losses, and how often it clipped."""
    twin = Clipping(
        False, case.get("layers", 3), case["rows"], sizes=case.get("sizes"), s=case["s"]
    )
    twin.tops, counts = {}, []

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            super().step()
            counts.append(twin.clip())

    kind = type("Twins", (Optimizer,), {})
    losses, _ = twin.train(
        STEPS, case["lr"], case["clip"], case=case,
        make=lambda groups, lr: kind(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8),
    )  # fmt: skip
    return twin, losses, sum(counts)


def held(world: Any, layouts: dict[str, dict[str, Any]]) -> None:
    cases = {name: BASE | each for name, each in layouts.items()}
    results = world(4).run(run_cases, list(cases.values()), STEPS)
    for i, (name, case) in enumerate(cases.items()):
        twin, losses, clipped = twin_of(case)
        assert clipped > STEPS, f"{name}: clipped {clipped} times"
        ranks = [each[i] for each in results]
        for rank in ranks:
            assert rank["losses"] == pytest.approx(losses, rel=1e-11), name
            for tensor, dim, start, local in rank["grads"]:
                full = twin.w[tensor].grad
                want = full.narrow(dim, start, local.shape[dim])
                error = (torch.from_numpy(local) - want).norm()
                assert error <= 1e-9 * full.norm(), (name, tensor)
        tops = torch.stack(list(twin.tops.values()))
        found = max(max(rank["logits"] or [-1.0]) for rank in ranks)
        assert found == pytest.approx(tops.max().item(), rel=1e-11), name


def test_it_is_the_twins(world: Any) -> None:
    held(world, LAYOUTS)


@pytest.mark.prove
def test_it_is_the_twins_on_other_layouts(world: Any) -> None:
    held(world, MORE)


@pytest.mark.prove
def test_bits_do_not_depend_on_zero_schedules_or_recomputation(world: Any) -> None:
    ways = [dict(zero=0), dict(zero=3, recompute="full"), dict(zero=1, recompute="selective")]
    pipes = [dict(pp=2, m=4, schedule=name, layers=4) for name in ("1f1b", "zb-h1")]
    for some in ([dict(dp=4) | way for way in ways], [dict(dp=2) | pipe for pipe in pipes]):
        cases = [BASE | dict(dtype="bfloat16") | each for each in some]
        for first, *others in world(4).run(run_cases, cases, STEPS):
            for case, other in zip(cases[1:], others, strict=True):
                assert other["losses"] == first["losses"], case
                assert other["logits"] == first["logits"], case
                assert same_bits(other["weights"], first["weights"]), case
