# SPDX-License-Identifier: Apache-2.0
"""Qwen3 as Hugging Face has it: configs, weights, logits, generated text, and back again."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model import llama as llama_file
from model import qwen3
from model.load import model_file_of
from mpu.comm.collectives import all_gather
from mpu.grid import Grid
from tests.launcher import Launcher, Result
from tests.saved import stored
from tools.checkpoint import main as convert
from tools.generate import generate, load_model

# the published config.json of the dense models: sizes that differ, then what they share
#        hidden  ffn  layers heads  tied
SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
    "32B": (5120, 25600, 64, 64, False),
}
SHARED = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 40960, "model_type": "qwen3",
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
CPU = torch.device("cpu")


def published(size: str) -> dict[str, Any]:
    hidden, ffn, layers, heads, tied = SIZES[size]
    return SHARED | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "tie_word_embeddings": tied, "max_window_layers": layers,
    }  # fmt: skip


def of_transformers_5(hf: dict[str, Any]) -> dict[str, Any]:
    """Spell a config as newer versions do."""
    out = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    out["rope_parameters"] = {"rope_theta": hf["rope_theta"], "rope_type": "default"}
    return out | {"dtype": "bfloat16", "layer_types": ["full_attention"] * hf["num_hidden_layers"]}


@pytest.mark.parametrize("size", SIZES)
def test_published_configs(size):
    hf = published(size)
    config = qwen3.from_hf_config(hf)
    hidden, ffn, layers, heads, tied = SIZES[size]
    assert config == llama_file.LlamaConfig(
        151936, hidden, ffn, layers, heads, 8, kv_channels=128, max_position_embeddings=40960,
        rotary_base=1e6, norm_epsilon=1e-6, tied=tied,
    )  # fmt: skip
    assert qwen3.from_hf_config(of_transformers_5(hf)) == config
    back = qwen3.hf_config(config, "bfloat16")
    assert qwen3.from_hf_config(back) == config
    without_effect = {"attention_dropout", "sliding_window", "transformers_version", "use_cache"}
    without_effect |= {"bos_token_id", "eos_token_id", "max_window_layers", "use_sliding_window"}
    assert {k: back[k] for k in hf.keys() - without_effect} == {
        k: hf[k] for k in hf.keys() - without_effect
    }
    assert model_file_of(hf) is qwen3 and model_file_of(back) is qwen3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("layer_types", ["full_attention"] * 27 + ["sliding_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("model_type", "llama"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"config.json: {field} "):
        qwen3.from_hf_config(published("0.6B") | {field: value})


FEW = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16,
       "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip


def hugging_face(folder: Path, **sizes: Any) -> Any:
    """Save a random Qwen3 with 2 layers and the fields of Qwen3-0.6B, but for `sizes`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hf = published("0.6B") | {"num_hidden_layers": 2, "vocab_size": 509, "initializer_range": 0.05}
    hf |= {"bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32"} | sizes
    theirs = Qwen3ForCausalLM(Qwen3Config(**hf, attn_implementation="eager")).float().eval()
    for param in theirs.parameters():
        if param.dim() == 1:
            param.data.normal_(1.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs


@torch.no_grad()
def logits_in(comm: Any, root: str, tokens: torch.Tensor) -> torch.Tensor:
    """Load a checkpoint or a Hugging Face directory cut over all ranks; return logits [b, s, V]."""
    model, _ = load_model(root, comm.grid(comm.size), CPU, torch.float32)
    assert type(model).__name__ == "Qwen3"
    logits = model(tokens).permute(2, 1, 0).contiguous()  # [V/t, b, s]
    every = all_gather(logits, model.ctx.tp)[0]
    return every[: model.config.vocab_size].permute(1, 2, 0)


def test_logits_text_and_tensors_are_those_of_transformers(world, tmp_path):
    """As it is, imported, and exported again."""
    theirs = hugging_face(tmp_path / "hf", **FEW)
    convert(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    convert(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft")])
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "out"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
    tokens = torch.randint(0, 509, (2, 48))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        text = theirs.generate(tokens[:1, :8], max_new_tokens=16, do_sample=False)[0, 8:].tolist()
        out = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager")
        again = out(tokens).logits
    assert torch.equal(wanted, again) and len(set(text)) > 5
    for size, place in ((1, "weft"), (2, "hf")):
        for ours in world(size).run(logits_in, str(tmp_path / place), tokens):
            assert (ours - wanted).norm() < 1e-5 * wanted.norm(), (size, place)
    model, _ = load_model(str(tmp_path / "hf"), Grid(), CPU, torch.float32)
    assert generate(model, tokens[0, :8].tolist(), max_new_tokens=16, temperature=0) == [text]


COMMON = """--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --seq-length 16
    --lr 1e-2 --lr-decay-style constant --micro-batch-size 2 --global-batch-size 4
    --log-interval 1 --num-workers 0 --device cpu"""
SMALL = f"""{COMMON} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --kv-channels 16
    --group-query-attention --num-query-groups 2 --norm-epsilon 1e-6 --rotary-base 1000000"""


def run(launcher: Launcher, ranks: int, flags: str, code: int = 0) -> Result:
    result = launcher.run(ranks, shlex.split(flags))
    assert result.codes == [code] * ranks, [result.said(r) for r in range(ranks)]
    return result


@pytest.mark.prove
def test_a_run_resumes_in_another_layout_and_is_not_taken_for_a_llama(launcher, tmp_path):
    """Megatron's flag trains it: tp 2, then pp 2, equal to one rank; then it is exported."""
    saved = f"--save {tmp_path}/saved --save-interval 2"
    tp2 = "--tensor-model-parallel-size 2 --sequence-parallel"
    run(launcher, 2, f"{SMALL} --qk-layernorm --train-iters 2 {saved} {tp2}")
    args = "--use-checkpoint-args --pipeline-model-parallel-size 2 --train-iters 4"
    last = run(launcher, 2, f"{COMMON} {args} --load {tmp_path}/saved")
    losses = [row["loss"] for row in last.rows() if "loss" in row]
    one = run(launcher, 1, f"{SMALL} --qk-layernorm --train-iters 4")
    wanted = [row["loss"] for row in one.rows() if "loss" in row]
    assert losses == pytest.approx(wanted[2:], rel=1e-5) and len(losses) == 2
    llama = f"{SMALL} --train-iters 4"
    refused = run(launcher, 1, f"{llama} --load {tmp_path}/saved", 2).said(0)
    assert "model_type is 'qwen3' there and 'llama' here (--model-file or --num-experts)" in refused
    run(launcher, 1, f"{llama} --save {tmp_path}/llama --save-interval 4")
    refused = run(launcher, 1, f"{llama} --qk-layernorm --load {tmp_path}/llama", 2).said(0)
    assert "model_type is 'llama' there and 'qwen3' here (--model-file or --num-experts)" in refused
    copy = shutil.copy(llama_file.__file__, tmp_path / "copy.py")
    said = run(launcher, 1, f"{llama} --model-file {copy} --load {tmp_path}/llama").said(0, "out")
    assert f"trained with --model-file model/llama.py; this run has {copy}" in said
    names = stored(tmp_path / "saved" / "step_00000002").keys()
    assert "model.layers.1.self_attn.k_norm.weight" in names
    convert(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "saved")])
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ours, _ = load_model(str(tmp_path / "saved"), Grid(), CPU, torch.float32)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        mine, wanted = ours(tokens)[..., :100].transpose(0, 1), theirs(tokens).logits
    assert (mine - wanted).norm() < 1e-5 * wanted.norm()
