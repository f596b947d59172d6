# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Llama comes in, computes the same logits, and goes out bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.llama import Llama, from_hf_config, hf_names
from model.load import load_model_file, of_checkpoint
from mpu.comm.collectives import all_gather
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.layers.rope import rope_frequencies
from mpu.param import unique_parameters
from tests.sampling import sampled
from tools.checkpoint import main
from tools.checkpoints.convert_huggingface import expected_tensors, export_hf, import_hf
from tools.checkpoints.copy import from_hf
from tools.generate import generate, load_model
from training.checkpoint import find_latest, load, parameter_pieces
from training.flags.model_sizes import of_model
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[2]
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 8, "rms_norm_eps": 1e-6},
    "llama3.1": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500000.0, **SCALED},
    },
    "llama3.2": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500000.0, **SCALED, "factor": 32.0},
    },
    "linear": {
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "linear", "factor": 4.0},
    },
    "yarn": {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 10000.0, **YARN}},
    "yarn, own numbers": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 1e6, **YARN, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 3.0, "beta_slow": 0.25, "attention_factor": 1.3, "truncate": False,
        },
    },
}  # fmt: skip
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
FEW = {key: YARN[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}


def hugging_face(kind: str, seed: int = 0, **more: Any) -> Any:
    """Make a small random Llama with transformers; 251 tokens: no layout divides that."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=251,
        hidden_size=96,
        intermediate_size=136,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=128,
        attn_implementation="eager",
        initializer_range=0.1,
        **{**KINDS[kind], **more},
    )
    return LlamaForCausalLM(config).float().eval()


class Alone:
    """What `logits_in` needs of a world of one rank."""

    size = 1

    def grid(self, tp: int) -> Grid:
        return Grid(tp)


def logits_in(comm: Any, root: str, tokens: torch.Tensor) -> torch.Tensor:
    """Load the checkpoint cut over all ranks and return the logits [b, s, V]."""
    grid = comm.grid(comm.size)
    found = find_latest(root, grid, from_hf=from_hf)
    assert found is not None
    model = Llama(from_hf_config(found.state["hf_config"]), LayerContext(grid))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        pieces = parameter_pieces(unique_parameters(model), hf_names(model), grid)
        load(found, pieces, grid)
        logits = model(tokens).permute(2, 0, 1).contiguous()  # [V/t, s, b]
    return all_gather(logits, grid.tp)[0][: model.config.vocab_size].permute(2, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(world: Any, tmp_path: Path, kind: str) -> None:
    theirs = hugging_face(kind)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    tokens = torch.randint(0, 251, (2, 64))
    with torch.no_grad():
        wanted = theirs(tokens).logits
    assert wanted.abs().max() > 1
    for size in (1, 2):
        for place in ("weft", "hf"):  # imported, or loaded as it is
            for ours in world(size).run(logits_in, str(tmp_path / place), tokens):
                assert (ours - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("kind", sampled([*KINDS], 2))
@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float32, torch.float16], 3))
def test_a_round_trip_keeps_every_bit(
    tmp_path: Path, kind: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaForCausalLM

    theirs = hugging_face(kind).to(dtype)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"a": "b"}')
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    shards = ["--max-shard-size", "0.0001"] if kind == "llama3.1" else []
    main(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft"), *shards])
    many = [p.name for p in (tmp_path / "out").glob("*.safetensors")]
    assert (len(many) > 3 and "model.safetensors" not in many) if shards else len(many) == 1
    for other in ("hf", "out"):
        assert main(["diff", str(tmp_path / "weft"), str(tmp_path / other), "--tensors"]) == 0
        assert main(["show", str(tmp_path / other), "--tensors"]) == 0
        assert "model.norm.weight" in capsys.readouterr().out
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert back.dtype == dtype
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": "b"}'
    for field in ("rope_parameters", "tie_word_embeddings", "rms_norm_eps", "eos_token_id"):
        assert getattr(back.config, field) == getattr(theirs.config, field), field
    mine, his = back.state_dict(), theirs.state_dict()
    assert mine.keys() == his.keys()
    for name in his:
        assert torch.equal(mine[name].view(torch.uint8), his[name].view(torch.uint8)), name


@pytest.mark.prove
@pytest.mark.parametrize(
    "rope",
    sampled(
        [
            FEW,
            FEW | MSCALE,
            FEW | {"mscale": 1.4, "mscale_all_dim": 0.0},
            {"type": "yarn", "factor": 4.0, "beta_fast": None},
            FEW | {"factor": 1.0},
            FEW | {"beta_fast": 2.0, "beta_slow": 1.9},
        ],
        3,
    ),
    ids=str,
)
def test_yarn_is_read_as_transformers_reads_it(tmp_path: Path, rope: dict[str, Any]) -> None:
    theirs = hugging_face("yarn", rope_parameters={"rope_theta": 10000.0, **rope})
    theirs.save_pretrained(tmp_path / "hf")
    at = tmp_path / "hf" / "config.json"
    plain = json.loads(at.read_text()) | {"rope_scaling": rope, "rope_theta": 10000.0}
    plain.pop("rope_parameters")  # as older versions of transformers wrote it
    tokens = torch.randint(0, 251, (2, 120))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        few = theirs.generate(tokens[:1, :8], max_new_tokens=60, do_sample=False)[0, 8:].tolist()
    for text in (at.read_text(), json.dumps(plain)):
        at.write_text(text)
        ours = logits_in(Alone(), str(tmp_path / "hf"), tokens)
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
    model, _ = load_model(str(tmp_path / "hf"), Grid(), torch.device("cpu"), torch.float32)
    assert generate(model, tokens[0, :8].tolist(), max_new_tokens=60, temperature=0) == [few]


def test_linear_scaling_is_megatrons_flag(tmp_path: Path) -> None:
    """--use-checkpoint-args takes it from the folder; each frequency is divided by the factor."""
    hugging_face("linear").save_pretrained(tmp_path / "hf")
    given = f"--use-checkpoint-args --load {tmp_path}/hf --finetune --mock-data --seq-length 64"
    flags = f"{given} --tokenizer-type NullTokenizer --lr 1e-3 --train-iters 1 --micro-batch-size 1"
    model = parse(f"{flags} --global-batch-size 1".split(), 1, of_checkpoint=of_checkpoint).model
    assert model.rotary_seq_len_interpolation_factor == 4.0 and not model.use_rope_scaling
    sizes = of_model(model)
    scaling = sizes["rope_scaling_factor"], sizes["rope_original_length"]
    for base in (2.0, 1e4):
        found = rope_frequencies(12, base, *scaling)
        assert torch.equal(found, rope_frequencies(12, base) / 4)


def test_a_mistral_without_a_window_comes_in(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}
    theirs = MistralForCausalLM(MistralConfig(vocab_size=251, **sizes, **heads)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    tokens = torch.randint(0, 251, (2, 40))
    with torch.no_grad():
        wanted = theirs(tokens).logits
    for place in ("hf", "weft"):
        ours = logits_in(Alone(), str(tmp_path / place), tokens)
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()


def export_in(comm: Any, root: str) -> None:
    """Save, cut over all ranks, a model that a Weft run drew."""
    from model.llama import LlamaConfig, hf_config
    from training.checkpoint import save

    config = LlamaConfig(251, 96, 136, 2, 8, 4, tied=True, rope_scaling_factor=8.0)
    grid = comm.grid(comm.size)
    model = Llama(config, LayerContext(grid)).initialize(3)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), grid)
    save(root, step=5, pieces=pieces, state={"hf_config": hf_config(config)}, grid=grid)


@pytest.mark.parametrize("size", [1, 2])
def test_what_we_trained_runs_in_transformers(world: Any, tmp_path: Path, size: int) -> None:
    from transformers import LlamaForCausalLM

    world(size).run(export_in, str(tmp_path / "weft"))
    main(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft")])
    tokens = torch.randint(0, 251, (2, 40))
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    (ours,) = world(1).run(logits_in, str(tmp_path / "weft"), tokens)
    assert (ours - theirs).abs().max() < 1e-5


def test_a_config_is_written_alike_with_and_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes rope_theta into the rope_scaling that it is given."""
    hugging_face("yarn").save_pretrained(tmp_path / "hf")
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    texts = []
    for name in ("with", "without"):
        main(["convert", "--to-hf", str(tmp_path / name), "--load", str(tmp_path / "weft")])
        texts.append((tmp_path / name / "config.json").read_text())
        monkeypatch.setitem(sys.modules, "transformers", None)
    assert texts[0] == texts[1] and "rope_theta" not in json.loads(texts[0])["rope_scaling"]


def test_another_dtype_on_the_way_out(tmp_path: Path) -> None:
    theirs = hugging_face("llama3.2")
    theirs.save_pretrained(tmp_path / "hf")
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    main(
        ["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "weft")]
        + ["--dtype", "bfloat16"]
    )
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(out[name], tensor.bfloat16())


@pytest.mark.prove
def test_a_run_takes_up_an_imported_model_at_any_size(tmp_path: Path) -> None:
    hugging_face("llama2").save_pretrained(tmp_path / "hf")
    main(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "weft")])
    flags = (
        "pretrain_llama.py --mock-data --tokenizer-type NullTokenizer --vocab-size 251 "
        "--num-layers 3 --hidden-size 96 --ffn-hidden-size 136 --num-attention-heads 8 "
        "--norm-epsilon 1e-6 --untie-embeddings-and-output-weights --seq-length 64 "
        "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 2 --log-interval 1 "
        "--num-workers 0 --device cpu --finetune"
    ).split()
    losses = []
    for tp, place in ((1, "weft"), (2, "weft"), (2, "hf")):
        log = tmp_path / f"log-{tp}-{place}.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
        more = ["--tensor-model-parallel-size", str(tp), "--log-json", str(log)]
        more += ["--load", str(tmp_path / place)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *launcher, *flags, *more],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"loaded the weights of {tmp_path / place}" in done.stdout
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert [len(each) for each in losses] == [2, 2, 2] and losses[1] == losses[2]
    assert losses[0][0] > 5.7  # the imported weights (std 0.1), not a fresh model at ln 251 = 5.5
    assert max(abs(a - b) for a, b in zip(*losses[:2], strict=True)) < 1e-4


FORK = """
import torch

from model import llama
from model.llama import LlamaConfig, from_hf_config, hf_config, parameter_group


class Model(llama.Llama):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.register_buffer("scale", torch.tensor(0.5, device=self.ctx.device))


def hf_names(model):
    names = llama.hf_names(model).items()
    return {name: tuple(n.replace("model.", "body.") for n in some) for name, some in names}


ModelConfig = LlamaConfig
"""


def test_a_fork_with_names_of_its_own_and_a_number_that_checkpoints_hold(tmp_path: Path) -> None:
    path = tmp_path / "fork.py"
    path.write_text(FORK)
    file = load_model_file(str(path))
    config = file.ModelConfig(11, 16, 8, 1, 4, 2)
    shapes = expected_tensors(file, config)
    assert shapes["scale"] == () and "body.embed_tokens.weight" in shapes
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(file.hf_config(config)))
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors")
    place = import_hf(source, tmp_path / "weft", str(path))
    export_hf(place, tmp_path / "back", None, 1 << 30, None, str(path))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_folder_of_a_forks_model_is_read_by_its_file(tmp_path: Path, capsys: Any) -> None:
    """Both ways; a conversion that would not read the file refuses its flag."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, sliding_window=16,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    fork = ["--model-file", str(ROOT / "examples" / "forks" / "gemma2.py")]
    words = ["convert", "--to-hf", str(tmp_path / "out"), "--load", str(tmp_path / "hf")]
    assert main([*words, *fork]) == 0, capsys.readouterr().err
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "hf"))
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    capsys.readouterr()
    words = ["convert", "--to-mcore", str(tmp_path / "mcore"), "--load", str(tmp_path / "out")]
    assert main([*words, *fork]) == 2
    assert "--model-file can only be used with --from-hf or --to-hf" in capsys.readouterr().err
