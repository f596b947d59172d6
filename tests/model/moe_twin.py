# SPDX-License-Identifier: Apache-2.0
"""The serial twin of a model with experts: a loop over tokens' experts, in plain torch."""

import math
from typing import Any

import torch

from tests.model.twin import Twin

FILE = "model/moe.py"
SPARSE = dict(num_experts=16, moe_router_topk=2, moe_ffn_hidden_size=12, moe_aux_loss_coeff=(0.5,))
ROWS = 8


class ExpertTwin(Twin):
    """A Twin whose MLPs are loops over experts.

    moe: as the case's. b: rows of a micro-batch, for the loss of a micro-batch. margin: the least
    difference of a layer's last chosen score from the next. counts: tokens of each expert, by
    layer, of the last loss; best: tokens that have it among their k best scores; before: `best` of
    the loss before. bias: of each layer's choice. parts: the
    positions of a row that each rank has, for the capacity of experts; dropped: pairs of the last
    loss.
    """

    def __init__(
        self,
        moe: dict[str, Any],
        b: int = 1,
        tied: bool = False,
        layers: int = 3,
        parts: list[list[int]] | None = None,
        file: str = FILE,
        **more: Any,
    ):
        super().__init__(tied, layers, ROWS, file, moe=moe, **more)
        self.moe, self.b = moe, b
        self.margin, self.counts, self.own = float("inf"), {}, 0.0
        self.parts, self.dropped = parts, 0
        self.best: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.bias: dict[str, torch.Tensor] = {}

    def loss(self, batch: dict) -> torch.Tensor:
        self.end_step()
        return super().loss(batch)

    def end_step(self) -> None:
        """Move the biases by the counts of the last loss; its `best` is that of the step before."""
        rate, self.before = self.moe.get("moe_router_bias_update_rate", 1e-3), self.best
        for at, counts in self.counts.items():
            few = counts.double().mean() - counts.double()
            self.bias[at] = self.bias.get(at, 0.0) + rate * torch.sign(few)
        self.counts, self.best, self.dropped = {}, {}, 0

    def mlp(self, x: torch.Tensor, at: str) -> torch.Tensor:
        moe, k = self.moe, self.moe["moe_router_topk"]
        experts = "block_sparse_moe" if f"{at}block_sparse_moe.gate.weight" in self.w else "mlp"
        gate = f"{at}{experts}.gate.weight"
        self.own = 0.0
        if gate not in self.w:
            return super().mlp(x, at)
        logits = x @ self.w[gate].t()  # [b, s, E]
        sigmoid = moe.get("moe_router_score_function") == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits
        best = self.chosen(scores.detach(), k)  # of all experts: DeepSeek-V3, eq. 18
        bias = self.bias.get(at, 0.0) if moe.get("moe_router_enable_expert_bias") else 0.0
        chosen = self.chosen(self.of_groups(scores.detach() + bias), k)
        self.counts[at], self.best[at] = chosen.sum((0, 1)), best.sum((0, 1))
        if sigmoid:
            weights = scores * chosen
            weights = weights / (weights.sum(-1, keepdim=True) if k > 1 else 1.0)
        elif moe.get("moe_router_pre_softmax"):
            weights = logits.softmax(-1) * chosen
        else:
            weights = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
        weights = weights * moe.get("moe_router_topk_scaling_factor", 1.0)
        if moe.get("moe_expert_capacity_factor"):
            weights = weights * self.kept(weights.detach(), chosen)
        names = ("w1", "w3", "w2") if experts != "mlp" else ("gate_proj", "up_proj", "down_proj")
        y = torch.zeros_like(x)
        for e in range(moe["num_experts"]):  # a token of an expert at a time has its own row
            mine = chosen[..., e]
            out = self.swiglu(x[mine], *(f"{at}{experts}.experts.{e}.{n}" for n in names))
            y = y.index_put((mine,), y[mine] + out * weights[..., e][mine][:, None])
        if moe.get("moe_shared_expert_intermediate_size"):
            shared = (f"{at}mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down"))
            y = y + self.swiglu(x, *shared)
        self.own = self.losses(logits, scores, best, sigmoid, at)
        return y

    def chosen(self, scores: torch.Tensor, k: int) -> torch.Tensor:
        """Return which of the last dimension are the k highest, and note by how much they are."""
        best = scores.sort(-1, descending=True).values
        if k == scores.shape[-1]:
            return torch.ones_like(scores, dtype=torch.bool)
        self.margin = min(self.margin, (best[..., k - 1] - best[..., k]).min().item())
        return scores >= best[..., k - 1 : k]

    def kept(self, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return which pairs [b, s, E] their experts take, rank by rank and micro-batch by
        micro-batch, one token after another.
        """
        moe, (b, s, e) = self.moe, weights.shape
        kept = torch.zeros_like(chosen)
        for first in range(0, b, self.b):
            for part in self.parts or [list(range(s))]:
                tokens = [(row, at) for at in part for row in range(first, first + self.b)]
                pairs = len(tokens) * moe["moe_router_topk"]
                most = math.ceil(pairs / e * moe["moe_expert_capacity_factor"])
                for expert in range(e):
                    mine = [at for at in tokens if chosen[at][expert]]
                    mine.sort(key=lambda at: -weights[at][expert].item())  # stable
                    if len(mine) > most:
                        last, next_one = (weights[mine[i]][expert] for i in (most - 1, most))
                        self.margin = min(self.margin, (last - next_one).item())
                    self.dropped += max(0, len(mine) - most)
                    for at in mine[:most]:
                        kept[at][expert] = True
        return kept

    def of_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [b, s, E], below all others where a group is not chosen."""
        groups, n = (self.moe.get(f"moe_router_{x}", 0) for x in ("num_groups", "group_topk"))
        if not groups:
            return scores
        parts = scores.unflatten(-1, (groups, -1))
        softmax = self.moe.get("moe_router_score_function", "softmax") == "softmax"
        if softmax and self.moe.get("moe_router_pre_softmax"):  # Megatron-LM: of probabilities
            sums = scores.softmax(-1).unflatten(-1, (groups, -1))
        else:
            sums = parts
        sums = sums.topk(self.moe["moe_router_topk"] // n, -1).values.sum(-1)
        return torch.where(self.chosen(sums, n)[..., None], parts, parts - 100.0).flatten(-2)

    def losses(self, logits, scores, best, sigmoid: bool, at: str = "") -> torch.Tensor:
        """Return the sum over all tokens of the balance loss and of the z-loss."""
        moe, (b, s, e) = self.moe, logits.shape
        p = scores / scores.sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
        kinds = moe.get("moe_router_load_balancing_type", ("aux_loss",))
        total = 0.0
        for kind, coefficient in zip(kinds, moe.get("moe_aux_loss_coeff", (0.0,)), strict=True):
            if kind == "lagged_global_aux_loss":
                f = self.before.get(at, torch.zeros(e)).double() / (b * s * moe["moe_router_topk"])
                total = total + coefficient * e * (f * p).sum()
                continue
            some = 1 if kind == "seq_aux_loss" else self.b
            for first in range(0, b, some):
                rows = slice(first, first + some)
                f = best[rows].double().sum((0, 1)) / (some * s * moe["moe_router_topk"])
                balance = e * (f * p[rows].mean((0, 1))).sum()
                total = total + balance * coefficient * some * s
        z = logits.logsumexp(-1).square().sum()
        return total + z * moe.get("moe_z_loss_coeff", 0.0)

    def auxiliary(self, h: torch.Tensor) -> torch.Tensor:
        return self.own
