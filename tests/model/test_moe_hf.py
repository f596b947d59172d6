# SPDX-License-Identifier: Apache-2.0
"""Mixtral and Qwen3-MoE as Hugging Face has them: configs, weights, logits, and back again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import moe
from model.load import model_file_of
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.recompute import Decisions
from tests.sampling import sampled
from tools.checkpoint import main as convert
from tools.generate import generate, load_model
from training.checkpoint import MismatchError, find_latest, save
from training.checkpoint.pieces import whole

CPU = torch.device("cpu")
# the published config.json of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# of rednote-hilab/dots.llm1.base
DOTS1 = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 151643, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 32768, "model_type": "dots1", "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000, "routed_scaling_factor": 2.5, "sliding_window": None,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 152064,
}  # fmt: skip
FREE = {
    "attention_dropout", "bos_token_id", "eos_token_id", "max_window_layers",
    "output_router_logits", "router_aux_loss_coef", "sliding_window", "transformers_version",
    "use_cache", "use_sliding_window",
}  # fmt: skip
TINY = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, initializer_range=0.2,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
QWEN_TINY = dict(num_experts=8, moe_intermediate_size=24, head_dim=16)
DOTS = dict(
    n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=24, head_dim=16, n_group=4,
    topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1,
    sliding_window=None,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=8)),
    "qwen3": ("Qwen3Moe", QWEN_TINY | dict(norm_topk_prob=True)),
    "qwen3, not normalised, dense layers": (
        "Qwen3Moe",
        QWEN_TINY | dict(norm_topk_prob=False, mlp_only_layers=[0], decoder_sparse_step=1),
    ),
    "dots1, one expert a token": (
        "Dots1", DOTS | dict(num_experts_per_tok=1, norm_topk_prob=False, n_group=1),
    ),
    "dots1, a bias, groups, a shared expert": ("Dots1", DOTS),
}  # fmt: skip


@pytest.mark.parametrize("hf", [MIXTRAL, QWEN3, DOTS1], ids=["mixtral", "qwen3", "dots1"])
def test_published_configs(hf: dict[str, Any]) -> None:
    config = moe.from_hf_config(hf)
    assert model_file_of(hf) is moe and config.num_experts in (8, 128)
    back = moe.hf_config(config, "bfloat16")
    same = hf.keys() - FREE
    assert {name: back[name] for name in same} == {name: hf[name] for name in same}
    assert replace(moe.from_hf_config(back), kv_channels=config.kv_channels) == config


@pytest.mark.parametrize(
    "hf, field, value",
    [
        (MIXTRAL, "hidden_act", "gelu"),
        (QWEN3, "attention_bias", True),
        (QWEN3, "model_type", "qwen2_moe"),
        (MIXTRAL, "model_type", "llama"),
        (DOTS1, "norm_topk_prob", False),
        (DOTS1, "scoring_func", "softmax"),
        (DOTS1, "routed_scaling_factor", 0.0),
    ],
)
def test_what_is_not_computed_is_refused_by_name(hf, field, value):
    with pytest.raises(ValueError, match=f"config.json: {field} is "):
        moe.from_hf_config(hf | {field: value})


ONE_LAYER = dict(num_hidden_layers=1, first_k_dense_replace=0)


def routers():
    """Yield the model, and what its config.json says of the router, in every small form."""
    for k in (1, 2, 3, 4):
        yield "Mixtral", dict(num_local_experts=8, num_experts_per_tok=k)
        for norm in (True, False):
            yield "Qwen3Moe", QWEN_TINY | dict(num_experts_per_tok=k, norm_topk_prob=norm)
            for groups, best in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
                own = dict(n_group=groups, topk_group=best, num_experts_per_tok=k)
                yield "Dots1", DOTS | own | dict(norm_topk_prob=norm)


@torch.no_grad()
def test_every_router_weighs_as_that_of_transformers_or_is_refused_by_its_field():
    import transformers

    torch.manual_seed(1)
    x, played, refused = torch.randn(40, 32), 0, list[str]()
    for kind, says in routers():
        played += 1
        config = getattr(transformers, f"{kind}Config")(**TINY | says | ONE_LAYER)
        try:
            read = moe.from_hf_config(config.to_dict() | {"model_type": config.model_type})
        except ValueError as error:
            refused.append(str(error))
            continue
        theirs = getattr(transformers, f"{kind}ForCausalLM")(config).model.layers[-1].mlp.gate
        ours = moe.SparseMLP(read, LayerContext(), Decisions())
        ours.router.weight.copy_(theirs.weight)
        if read.moe_router_enable_expert_bias:
            theirs.e_score_correction_bias.normal_(0.0, 0.1)
            ours.load.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
        _, weights, indices = theirs(x)
        logits = ours.router(x)
        scores = logits.sigmoid() if read.moe_router_score_function == "sigmoid" else logits
        choice = ours.decide(scores, 1).plan.choice
        mine = torch.zeros(40, 8).scatter_(1, choice, ours.weights(scores, choice))
        wanted = torch.zeros(40, 8).scatter_(1, indices, weights.float())
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6, msg=str((kind, says)))
        assert moe.hf_config(read)["model_type"] == config.model_type
        again = moe.from_hf_config(moe.hf_config(read))
        assert replace(again, kv_channels=read.kv_channels) == read, (kind, says)
    one = [line for line in refused if "num_experts_per_tok is 1" in line]
    assert len(one) == 8 and sum("norm_topk_prob True" in line for line in one) == 7
    by_field = ("num_experts_per_tok", "norm_topk_prob", "topk_group", "moe_router_group_topk")
    assert all(any(field in line for field in by_field) for line in refused), refused
    assert (played, len(refused)) == (60, 35)


def test_a_run_goes_on_though_its_model_has_another_name_now(tmp_path):
    """A Dots1 of one expert a token was "moe", which only Weft reads."""
    sizes = replace(moe.from_hf_config(DOTS1 | dict(num_experts_per_tok=1, norm_topk_prob=False)),
                    num_layers=1, moe_layer_freq=1)  # fmt: skip
    now, other = moe.hf_config(sizes), moe.hf_config(replace(sizes, qk_layernorm=False))
    assert (now["model_type"], other["model_type"]) == ("dots1", "moe")
    before = other | {"qk_layernorm": True}
    a = whole("a", torch.ones(1))
    save(tmp_path, step=1, pieces=[a], state={"hf_config": before}, grid=Grid())
    words = dict(grid=Grid(), pieces=[a], from_hf=lambda hf: moe.hf_config(moe.from_hf_config(hf)))
    assert find_latest(tmp_path, **words, expect=now).step == 1
    with pytest.raises(MismatchError, match="another model: qk_layernorm is True there and"):
        find_latest(tmp_path, **words, expect=other)


@pytest.mark.parametrize("best", [0, 3, 5])
def test_groups_of_experts_that_no_router_can_choose_are_refused(best):
    sizes = dict(num_experts=64, moe_router_num_groups=4, moe_router_topk=8)
    config = replace(moe.from_hf_config(DOTS1), **sizes, moe_router_group_topk=2)
    with pytest.raises(ValueError, match=f"moe_router_group_topk is {best}: it must be a whole nu"):
        replace(config, moe_router_group_topk=best)


def hugging_face(folder: Path, kind: str) -> Any:
    """Save a random model of transformers, whose norms are not 1; return it."""
    import transformers

    name, more = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**TINY | more, attn_implementation="eager")
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for param in theirs.parameters():
        if param.dim() == 1:
            param.data.normal_(1.0, 0.3)
    for buffer in (b for n, b in theirs.named_buffers() if n.endswith("correction_bias")):
        buffer.normal_(0.0, 0.2)
    theirs.save_pretrained(folder)
    return theirs


@torch.no_grad()
def logits_in(comm: Any, root: str, ep: int, tokens: torch.Tensor) -> torch.Tensor:
    model, _ = load_model(root, comm.grid(ep=ep), CPU, torch.float32)
    assert type(model).__name__ == "MoE"
    return model(tokens)[..., : model.config.vocab_size].transpose(0, 1).contiguous()


@pytest.mark.parametrize("kind", sampled(list(KINDS)[::-1], 5))
def test_logits_and_tensors_are_those_of_transformers(world, tmp_path, kind):
    """As it is, imported, and exported again; experts dealt out over 1, 2 and 4 ranks."""
    torch.manual_seed(3)
    theirs = hugging_face(tmp_path / "hf", kind)
    convert(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    convert(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft")])
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "out"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
    shutil.copytree(tmp_path / "hf", tmp_path / "fused")  # as transformers 5 has it in memory
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in theirs.state_dict().items()},
        tmp_path / "fused" / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    again = ["--from-hf", str(tmp_path / "fused"), "--save", str(tmp_path / "again")]
    assert convert(["convert", *again]) == 0
    assert convert(["diff", str(tmp_path / "weft"), str(tmp_path / "again"), "--tensors"]) == 0
    tokens = torch.randint(0, 99, (2, 24))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        text = theirs.generate(tokens[:1, :8], max_new_tokens=12, do_sample=False)[0, 8:].tolist()
        out = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager")
        assert torch.equal(out(tokens).logits, wanted)
    for ranks, place in ((1, "weft"), (2, "hf"), (4, "fused")):
        for ours in world(ranks).run(logits_in, str(tmp_path / place), ranks, tokens):
            assert (ours - wanted).norm() < 1e-5 * wanted.norm(), (ranks, place)
    model, _ = load_model(str(tmp_path / "hf"), Grid(), CPU, torch.float32)
    assert generate(model, tokens[0, :8].tolist(), max_new_tokens=12, temperature=0) == [text]
