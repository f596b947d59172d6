# SPDX-License-Identifier: Apache-2.0
"""examples/forks/deepseek.py: latent attention and its router, as transformers computes them.

Logits and decoding are compared in fp64 with DeepseekV2ForCausalLM and DeepseekV3ForCausalLM, and
training on tensor, context and expert parallel ranks with one rank.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forecast.obeyed_flags import check_flags
from model.load import load_model_file, model_file_of
from mpu.comm.collectives import all_gather
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.param import placement_of, saved_buffers, unique_parameters
from pretrain_llama import model_provider
from tests.model.test_worked_forks import equal
from tests.model.twin import config_of, run_cases
from tools.checkpoint import main as convert
from tools.generate import load_model
from training.flags.parse import parse
from training.run.model_profile import model_profile

PATH = str(Path(__file__).resolve().parents[2] / "examples/forks/deepseek.py")
FILE = load_model_file(PATH)
KIND = torch.float64
YARN: dict[str, Any] = dict(
    beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=4096, type="yarn",
)  # fmt: skip
V2_YARN = YARN | dict(mscale=0.707, mscale_all_dim=0.707)
# the published config.json of deepseek-ai/DeepSeek-V2-Lite, V2, V3, moonshotai/Moonlight-16B-A3B
# and Kimi-K2-Instruct, without what only tokenizers and generation read
V2_LITE: dict[str, Any] = dict(
    architectures=["DeepseekV2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_act="silu", hidden_size=2048,
    initializer_range=0.02, intermediate_size=10944, kv_lora_rank=512,
    max_position_embeddings=163840, model_type="deepseek_v2", moe_intermediate_size=1408,
    moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False,
    num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16,
    q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling=V2_YARN, rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax",
    seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="greedy",
    torch_dtype="bfloat16", use_cache=True, v_head_dim=128, vocab_size=102400,
)  # fmt: skip
V2 = V2_LITE | dict(
    hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_group=8,
    n_routed_experts=160, num_attention_heads=128, num_hidden_layers=60, num_key_value_heads=128,
    q_lora_rank=1536, routed_scaling_factor=16.0, topk_group=3, topk_method="group_limited_greedy",
)  # fmt: skip
V3: dict[str, Any] = V2 | dict(
    architectures=["DeepseekV3ForCausalLM"], first_k_dense_replace=3, hidden_size=7168,
    intermediate_size=18432, model_type="deepseek_v3", moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
    num_hidden_layers=61, num_nextn_predict_layers=1, rope_scaling=YARN, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", vocab_size=129280,
)  # fmt: skip
MOONLIGHT = {k: v for k, v in V3.items() if k != "rope_scaling"} | dict(
    first_k_dense_replace=1, hidden_size=2048, intermediate_size=11264,
    max_position_embeddings=8192, moe_intermediate_size=1408, n_group=1, n_routed_experts=64,
    n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
    num_key_value_heads=16, q_lora_rank=None, rms_norm_eps=1e-5, rope_theta=50000.0,
    routed_scaling_factor=2.446, topk_group=1, vocab_size=163840,
)  # fmt: skip
KIMI = V3 | dict(
    first_k_dense_replace=1, max_position_embeddings=131072, model_type="kimi_k2", n_group=1,
    n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64, rope_theta=50000.0,
    rope_scaling=YARN | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
    routed_scaling_factor=2.827, topk_group=1, vocab_size=163840,
)  # fmt: skip
CONFIGS = dict(V2_LITE=V2_LITE, V2=V2, V3=V3, MOONLIGHT=MOONLIGHT, KIMI=KIMI)
# what is not the model's, or is the same there in another form
FREE = {"aux_loss_alpha", "attention_dropout", "seq_aux", "use_cache", "rope_scaling",
        "num_nextn_predict_layers", "n_group", "topk_group", "model_type", "rope_theta",
        "architectures"}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs(name: str) -> None:
    hf = CONFIGS[name]
    config = FILE.from_hf_config(hf)
    back = FILE.hf_config(config, "bfloat16")
    same = hf.keys() - FREE
    assert {k: back[k] for k in same} == {k: hf[k] for k in same}
    assert FILE.from_hf_config(back) == config
    if "rope_scaling" in hf:
        for field in ("mscale", "mscale_all_dim", "factor", "beta_fast", "beta_slow"):
            assert back["rope_scaling"][field] == pytest.approx(hf["rope_scaling"][field])
    m = 0.1 * 0.707 * 3.6888794541139363 + 1  # ln 40
    if name == "V2":
        assert config.score_scale == pytest.approx(m * m * 192**-0.5)
    with pytest.raises(ValueError, match="attention .in examples/forks/deepseek.py"):
        model_file_of(hf)


def test_the_parameters_of_v2_lite() -> None:
    config = replace(FILE.from_hf_config(V2_LITE), make_vocab_size_divisible_by=1)
    model = FILE.Model(config, LayerContext(device=torch.device("meta")))
    assert sum(p.numel() for p in model.parameters()) == 15_706_484_224


@pytest.mark.parametrize(
    "hf, field, value",
    [
        (V3, "quantization_config", {"quant_method": "fp8"}),
        (V3, "rope_interleave", False),
        (V3, "norm_topk_prob", "x"),
        (V3, "routed_scaling_factor", 0),
        (V3, "topk_method", "greedy"),
        (V3, "topk_group", 9),
        (V3, "moe_layer_freq", 2),
        (V3, "model_type", "llama"),
        (V2, "scoring_func", "sigmoid"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(hf, field, value):
    with pytest.raises(ValueError, match=f"^config.json: {field} is "):
        FILE.from_hf_config(hf | {field: value})


MISTAKES = [
    (dict(kv_channels=128), "kv_channels .* it must be 192, the qk_head_dim"),
    (dict(num_query_groups=8), "num_query_groups .* each head has a key"),
    (dict(qk_layernorm=True), "qk_layernorm is True: it must be left out"),
    (dict(qk_pos_emb_head_dim=63, kv_channels=191), "qk_pos_emb_head_dim is 63: it must be even"),
    (dict(v_head_dim=0), "v_head_dim is 0: it must be a whole number from 1"),
    (dict(kv_lora_rank=2.5), "kv_lora_rank is 2.5"),
    (dict(yarn=None), "softmax_mscale is of yarn's scaling"),
    (dict(softmax_scale=0.1), "softmax_scale is 0.1: it must be 0"),
    (dict(moe_router_enable_expert_bias=False), "router is a softmax of all experts, --moe-"),
    (dict(moe_layer_freq=2), "moe_layer_freq is 2: it must be 0 for the first layers"),
    (dict(moe_shared_expert_intermediate_size=100), "it must be a multiple of an expert's 2048"),
]


def test_a_scale_that_is_no_number_is_named():
    scaling = YARN | dict(mscale=None, mscale_all_dim="1.0")
    with pytest.raises(ValueError, match="^softmax_mscale is '1.0': it must be from 0 on"):
        FILE.from_hf_config(V3 | dict(rope_scaling=scaling))


@pytest.mark.parametrize("change, message", MISTAKES)
def test_sizes_that_cannot_be_are_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FILE.from_hf_config(V3), **change)


# --- logits

SMALL: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, initializer_range=0.2, max_position_embeddings=64, kv_lora_rank=10,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, n_routed_experts=8, n_shared_experts=2,
    moe_intermediate_size=24, first_k_dense_replace=1, num_experts_per_tok=4,
)  # fmt: skip
STRETCHED = YARN | dict(factor=4.0, original_max_position_embeddings=16)
FORMS: dict[str, tuple[str, dict[str, Any], float]] = {  # transformers' class, config, tolerance
    "v3": ("DeepseekV3", dict(q_lora_rank=12, n_group=4, topk_group=2, rope_scaling=STRETCHED,
                              routed_scaling_factor=2.5), 1e-12),
    "moonlight": ("DeepseekV3", dict(q_lora_rank=None, n_group=1, topk_group=1, rms_norm_eps=1e-5,
                                     rope_theta=500.0), 1e-12),
    "v2": ("DeepseekV2", dict(q_lora_rank=12, n_group=4, topk_group=2, rope_scaling=STRETCHED,
                              topk_method="group_limited_greedy", routed_scaling_factor=16.0),
           1e-6),
    "v2-lite": ("DeepseekV2", dict(q_lora_rank=None, topk_method="greedy", norm_topk_prob=False,
                                   rope_scaling=STRETCHED | {"mscale": 0.5}), 1e-6),
}  # fmt: skip


class Wide:
    """torch, of which fp32 is fp64: transformers computes norms, routers and softmax in fp32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def both(form: str, monkeypatch: Any) -> tuple[Any, Any]:
    """Return transformers' model and ours with the same weights, in fp64."""
    import transformers
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    for module in (modeling_rope_utils, modeling_deepseek_v2, modeling_deepseek_v3):
        monkeypatch.setattr(module, "torch", Wide())
    name, own, _ = FORMS[form]
    torch.manual_seed(1)
    hf = getattr(transformers, f"{name}Config")(**SMALL | own)
    hf._attn_implementation = hf._experts_implementation = "eager"
    theirs = getattr(transformers, f"{name}ForCausalLM")(hf).double().eval()
    for key, value in theirs.state_dict().items():  # norms, and the bias of the choice
        if value.dim() == 1:
            value.add_(0.2 * torch.randn(value.shape, dtype=KIND).to(value.dtype))
            if key.endswith("e_score_correction_bias"):
                value.mul_(0.2)
    config = FILE.from_hf_config(hf.to_dict())
    ctx = LayerContext(dtype=KIND, accumulate=KIND, sink=GradientSink(KIND))
    ours = FILE.Model(config, ctx).initialize(1)
    names, state = FILE.hf_names(ours), unfused(theirs.state_dict())
    with torch.no_grad():
        for key, param in unique_parameters(ours):
            for piece in placement_of(param).pieces(names[key]):
                here = param.narrow(piece.dim, piece.local, piece.size)
                here.copy_(state.pop(piece.name))
        for key, buffer in saved_buffers(ours):
            buffer.copy_(state.pop(names[key][0]))
    assert not state, "weights of transformers that the file does not name"
    return theirs, ours


def unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of each expert under a name of its own, as checkpoints have."""
    found = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, each in enumerate(value):
                gate, up = each.chunk(2)
                base = name.removesuffix("gate_up_proj") + str(e)
                found |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            found |= {f"{base}{e}.down_proj.weight": each for e, each in enumerate(value)}
        else:
            found[name] = value
    return found


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers(form, monkeypatch):
    theirs, ours = both(form, monkeypatch)
    tokens, size = torch.arange(46).view(2, 23) * 7 % 99, FORMS[form][2]
    want = theirs(tokens, use_cache=False).logits
    got = ours(tokens)[..., :99].transpose(0, 1)
    assert (got - want).norm() < size * want.norm()
    caches: list[list[Tensor]] = [[] for _ in range(3)]
    parts = [ours.decode(tokens[:, a:b], a, caches) for a, b in ((0, 9), (9, 10), (10, 23))]
    assert (torch.cat(parts)[..., :99].transpose(0, 1) - got).norm() < 1e-13 * got.norm()
    packed = PackedSeqParams.of([9, 14, 23])  # two documents in the first row
    positions = torch.tensor([[*range(9), *range(14)], [*range(23)]])
    apart = ours(tokens, position_ids=positions, packed_seq_params=packed)[..., :99].transpose(0, 1)
    alone = [ours(tokens[:1, a:b])[:, 0, :99] for a, b in ((0, 9), (9, 23))]
    assert (apart[0] - torch.cat(alone)).norm() < 1e-13 * got.norm()
    assert (apart[1] - got[1]).norm() < 1e-13 * got.norm()


@torch.no_grad()
def logits_in(comm: Any, root: str, cut: dict[str, int], tokens: Tensor) -> Tensor:
    model, _ = load_model(root, comm.grid(**cut), torch.device("cpu"), torch.float32, PATH)
    every = all_gather(model(tokens).permute(2, 1, 0).contiguous(), model.ctx.tp)[0]
    return every[: model.config.vocab_size].permute(1, 2, 0)


@torch.no_grad()
def test_a_folder_goes_through_a_checkpoint_and_back(world, tmp_path, capsys):
    """Tensor by tensor to the bit; the layer of multi-token prediction is left out with a line."""
    import transformers

    name, own, _ = FORMS["v3"]
    torch.manual_seed(2)
    hf = getattr(transformers, f"{name}Config")(**SMALL | own, num_nextn_predict_layers=1)
    theirs = getattr(transformers, f"{name}ForCausalLM")(hf).float().eval()
    for param in theirs.parameters():
        if param.dim() == 1:
            param.normal_(1.0, 0.3)
    hf._attn_implementation = hf._experts_implementation = "eager"
    theirs.save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(state | extra, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    given = ["convert", "--model-file", PATH]
    convert([*given, "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    text = "".join(capsys.readouterr())
    assert "1 tensors of multi-token prediction are left out: model.layers.3.eh_proj" in text
    convert([*given, "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft")])
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    tokens = torch.arange(46).view(2, 23) * 7 % 99
    want = theirs(tokens, use_cache=False).logits
    cuts: dict[str, dict[str, int]] = {"hf": dict(ep=2), "weft": dict(tp=2)}
    for place, cut in cuts.items():
        for got in world(2).run(logits_in, str(tmp_path / place), cut, tokens):
            assert (got - want).norm() < 1e-5 * want.norm()


# --- layouts

EXPERTS = dict(num_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=20)
ROUTERS: dict[str, dict[str, Any]] = {
    "v2": dict(moe_router_pre_softmax=True),
    "v3": dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_num_groups=2, moe_router_group_topk=1, moe_layer_freq=(0, 1, 1),
    ),
}  # fmt: skip
OWN = dict(q_lora_rank=10, kv_lora_rank=6, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=7)
ALONE: dict[str, Any] = dict(
    tp=1, dp=1, m=1, sp=False, recompute=None, tied=False, file=PATH, lr=1e-2, clip=0.5, masks=True,
    rows=4, s=48, sizes=dict(num_query_groups=8, kv_channels=10, use_rope_scaling=False),
)  # fmt: skip


def case(router: str, **way: Any) -> dict[str, Any]:
    extra = OWN | ({"q_lora_rank": 0} if router == "v2" else {})
    return ALONE | dict(moe=EXPERTS | ROUTERS[router], extra=tuple(extra.items())) | way


WAYS = [
    dict(tp=2, sp=True, ep=2),
    dict(cp=2, comm="all_gather"),
    dict(cp=2, comm="p2p", ep=2, dispatch="alltoall", recompute="selective"),
    dict(pp=2, m=2, schedule="1f1b", recompute="full"),
]


@pytest.mark.parametrize("router", ["v3", pytest.param("v2", marks=pytest.mark.prove)])
def test_two_ranks_train_as_one(world, router):
    """Two steps each way, and on one rank: losses, norms, every gradient."""
    alone = case(router, layers=3)
    (one,) = world(1).run(run_cases, [alone], 2)[0]
    for rank in world(2).run(run_cases, [alone | way for way in WAYS], 2):
        for way, got in zip(WAYS, rank, strict=True):
            equal(got, one, f"{router}, {way}")


def test_a_plan_counts_the_sizes_of_q_and_v():
    """a s (d + e) FLOPs a token of causal attention, and the weights as they are used."""
    profile = model_profile(config_of(case("v3")), model_provider)
    assert {*profile.core} == {8 * 48 * (10 + 7)}
    heads = 10 * 80 + 6 * 8 * (6 + 7) + 56 * 28  # q_b, kv_b and proj
    latents = 28 * (10 + 6 + 4)
    assert profile.layers[0] - profile.core[0] == 2 * (heads + latents + 3 * 28 * 20)


def test_flags_of_attention_are_obeyed_or_refused_by_name():
    """A layer that keeps its core's `attend` is heard; QK-clip has no rows of W_q and W_k."""
    own = [f"--{name.replace('_', '-')} {size}" for name, size in OWN.items()]
    router = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    line = f"""--mock-data --vocab-size 97 --num-layers 2 --hidden-size 32 --ffn-hidden-size 24
        --num-attention-heads 4 --kv-channels 10 --num-experts 4 {router} {" ".join(own)}
        --seq-length 16 --global-batch-size 2 --lr 1e-3 --train-iters 1 --model-file {PATH}"""

    def checked(flags: str) -> None:
        argv = [*line.split(), *flags.split()]
        check_flags(parse(argv, 1, FILE.extra_args_provider), model_provider)

    for flags in ("--log-max-attention-logit", "--recompute-granularity selective",
                  "--attention-backend flash --bf16 --device cuda --dry-run --v-head-dim 8"
                  " --qk-head-dim 12 --kv-channels 16"):  # fmt: skip
        checked(f"--device cpu {flags}" if "cuda" not in flags else flags)
    with pytest.raises(ValueError, match="^--qk-clip: .*makes queries and keys by qkv_linear"):
        checked("--device cpu --qk-clip")
