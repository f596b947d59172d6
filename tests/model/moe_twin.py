# SPDX-License-Identifier: Apache-2.0
"""The serial twin of a model with experts: a loop over tokens' experts, in plain torch."""

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
    layer, of the last loss.
    """

    def __init__(self, moe: dict[str, Any], b: int = 1, tied: bool = False, layers: int = 3):
        super().__init__(tied, layers, ROWS, FILE, moe=moe)
        self.moe, self.b = moe, b
        self.margin, self.counts, self.own = float("inf"), {}, 0.0

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
        best = scores.detach().sort(-1, descending=True).values
        self.margin = min(self.margin, (best[..., k - 1] - best[..., k]).min().item())
        chosen = scores >= best[..., k - 1 : k]  # [b, s, E]
        self.counts[at] = chosen.sum((0, 1))
        if sigmoid:
            weights = scores * chosen
            weights = weights / (weights.sum(-1, keepdim=True) if k > 1 else 1.0)
        elif moe.get("moe_router_pre_softmax"):
            weights = logits.softmax(-1) * chosen
        else:
            weights = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
        weights = weights * moe.get("moe_router_topk_scaling_factor", 1.0)
        names = ("w1", "w3", "w2") if experts != "mlp" else ("gate_proj", "up_proj", "down_proj")
        y = torch.zeros_like(x)
        for e in range(moe["num_experts"]):  # a token of an expert at a time has its own row
            mine = chosen[..., e]
            out = self.swiglu(x[mine], *(f"{at}{experts}.experts.{e}.{n}" for n in names))
            y = y.index_put((mine,), y[mine] + out * weights[..., e][mine][:, None])
        if moe.get("moe_shared_expert_intermediate_size"):
            shared = (f"{at}mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down"))
            y = y + self.swiglu(x, *shared)
        self.own = self.losses(logits, scores, chosen, sigmoid)
        return y

    def losses(self, logits, scores, chosen, sigmoid: bool) -> torch.Tensor:
        """Return the sum over all tokens of the balance loss and of the z-loss."""
        moe, (b, s, e) = self.moe, logits.shape
        p = scores / scores.sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
        kinds = moe.get("moe_router_load_balancing_type", ("aux_loss",))
        total = 0.0
        for kind, coefficient in zip(kinds, moe.get("moe_aux_loss_coeff", (0.0,)), strict=True):
            some = 1 if kind == "seq_aux_loss" else self.b
            for first in range(0, b, some):
                rows = slice(first, first + some)
                f = chosen[rows].double().sum((0, 1)) / (some * s * moe["moe_router_topk"])
                balance = e * (f * p[rows].mean((0, 1))).sum()
                total = total + balance * coefficient * some * s
        z = logits.logsumexp(-1).square().sum()
        return total + z * moe.get("moe_z_loss_coeff", 0.0)

    def auxiliary(self, h: torch.Tensor) -> torch.Tensor:
        return self.own
