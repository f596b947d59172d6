# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-args takes all of a model from a folder, a fork's own fields too.

The folders are transformers' own, of random weights. Given as flags or taken from the folder, the
sizes are the same, and so are the losses, bit for bit; also where the run resumes.
"""

import json
from pathlib import Path

import pytest
import torch

SMALL = """--mock-data --tokenizer-type NullTokenizer --seq-length 16 --micro-batch-size 1 --lr 1e-3
    --device cpu --log-interval 1 --lr-decay-iters 9""".split()
SIZES = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --vocab-size
    200 --group-query-attention --num-query-groups 2 --max-position-embeddings 64""".split()
COMMON = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
UNTIED = "--untie-embeddings-and-output-weights"
# by file: transformers' config, its fields besides COMMON, the same as flags, and one to contradict
FORKS = {
    "examples/forks/gemma3.py": (
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 5e5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
         "tie_word_embeddings": True},
        "--kv-channels 16 --query-pre-attn-scalar 20 --sliding-window 8 --sliding-window-pattern 2 "
        "--rotary-base 500000 --rope-local-base-freq 20000 --norm-epsilon 1e-6",
        "--sliding-window 9",
    ),
    "examples/forks/granite.py": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
         "logits_scaling": 2.0},
        f"{UNTIED} --embedding-multiplier 3 --attention-multiplier 0.2 --residual-multiplier 0.5 "
        "--logits-scaling 2 --norm-epsilon 1e-6",
        "--residual-multiplier 0.25",
    ),
    "model/moe.py": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        f"{UNTIED} --kv-channels 16 --norm-epsilon 1e-6 --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 24 --qk-layernorm",
        "",
    ),
}  # fmt: skip


def run(launcher, folder: Path, iterations: int, *flags, code: int = 0):
    """Train up to an iteration; return the losses of its steps, and what was said."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    argv = [*SMALL, "--train-iters", str(iterations), *map(str, flags), "--log-json", log]
    done = launcher.python("pretrain_llama.py", *argv)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [row["loss"] for row in rows if "loss" in row], said


@pytest.mark.prove  # the tests below read such a folder too
@pytest.mark.parametrize("file", list(FORKS))
def test_a_folder_of_transformers(launcher, tmp_path, file):
    transformers = pytest.importorskip("transformers")
    name, fields, flags, other = FORKS[file]
    config = getattr(transformers, name)(**{**COMMON, **fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path / "hf")
    taken = ("--model-file", file, "--use-checkpoint-args")
    given = () if file == "model/moe.py" else ("--model-file", file)
    given = (*given, *SIZES, *flags.split())
    folder, saved = ("--load", tmp_path / "hf"), tmp_path / "saved"
    both = ("--save", saved, "--load", saved)
    by_flags, _ = run(launcher, tmp_path, 4, *given, *folder)
    found, _ = run(launcher, tmp_path, 4, *taken, *folder)
    assert len(found) == 4 and found == by_flags
    first, _ = run(launcher, tmp_path, 2, *taken, *folder, "--save", saved)
    second, _ = run(launcher, tmp_path, 3, *given, *both)
    third, _ = run(launcher, tmp_path, 4, *taken, *both)
    assert first + second + third == by_flags
    if other:
        flag, value = other.split()
        _, said = run(launcher, tmp_path, 4, *taken, *folder, flag, value, code=2)
        says = f"{flag} {value} contradicts --use-checkpoint-args: {tmp_path}/hf has "
        assert says in said and f"leave {flag} out" in said


OWN_FIELD = """from dataclasses import dataclass

from model import llama
from model.llama import *


@dataclass(frozen=True)
class Config(llama.LlamaConfig):
    gain: float = 1.0  # which no flag sets


class Model(llama.Llama):
    def embed(self, tokens):
        return super().embed(tokens) * self.config.gain


def hf_config(config, dtype="float32"):
    return {**llama.hf_config(config, dtype), "model_type": "mine", "gain": config.gain}


def from_hf_config(hf):
    return llama.read_hf_config(hf, "mine", Config, gain=hf["gain"])


ModelConfig = Config
"""


@pytest.mark.prove
def test_a_field_without_a_flag_comes_from_the_folder(launcher, tmp_path):
    """The run that has its default instead is refused."""
    (tmp_path / "mine.py").write_text(OWN_FIELD)
    file, saved = ("--model-file", tmp_path / "mine.py"), tmp_path / "saved"
    run(launcher, tmp_path, 1, *SIZES, *file, "--save", saved, "--save-hf", tmp_path / "hf")
    folder = tmp_path / "hf" / "step_00000001"
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**sizes, "gain": 4.0}))
    loud, _ = run(launcher, tmp_path, 1, *file, "--use-checkpoint-args", "--load", folder)
    (folder / "config.json").write_text(json.dumps(sizes))
    quiet, _ = run(launcher, tmp_path, 1, *file, "--use-checkpoint-args", "--load", folder)
    assert loud != quiet
    (folder / "config.json").write_text(json.dumps({**sizes, "gain": 4.0}))
    _, said = run(launcher, tmp_path, 1, *SIZES, *file, "--load", folder, code=2)
    assert "gain is 4.0 there and 1.0 here" in said
