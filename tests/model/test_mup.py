# SPDX-License-Identifier: Apache-2.0
"""muP: the same on every layout, what Hugging Face calls Granite, said by the model's file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from benchmarks import coordinate_check
from model.llama import hf_config, with_mup
from model.load import config_of, load_model_file, read_sizes
from mpu.grid import Grid
from mpu.mup import MuP
from mpu.param import placement_of, unique_parameters
from tests.model.twin import ADAMW, Twin, run_cases
from tests.model.twin import config_of as run_config
from training.checkpoint.errors import MismatchError
from training.checkpoint.load import Checkpoint
from training.faults.monitor import FailureMonitor
from training.settings.update_rules import optimizer_groups

M = 4.0  # hidden 28 over 7
MUP = dict(use_mup=True, mup_base_hidden_size=7, mup_embedding_mult=3.0, mup_base_head_dim=2.0)
BASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=False, m=1, rows=8, lr=1e-2, layers=2)
BASE |= dict(sizes=MUP, s=16)
LAYOUTS = [
    dict(tp=2, sp=True, dp=2, zero=3),
    dict(pp=2, dp=2, m=2, zero=1, tied=True),
    dict(cp=2, tp=2, chunk=16, masks=True),
]
STEPS = 3


class Wide(Twin):
    """The twin with muP's multipliers, written out."""

    embedding_mult, softmax_scale, logits_divisor = 3.0, 2**0.5 / 6, M

    def optimizer(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.AdamW:
        """Divide the learning rate and eps of the matrices of blocks by M."""
        hidden = {p for n, p in self.w.items() if "layers." in n and p.dim() > 1}
        made = []
        for group in groups:
            for own in ([p for p in group["params"] if (p in hidden) == flag] for flag in (0, 1)):
                by = M if own and own[0] in hidden else 1.0
                made.append({**group, "params": own, "lr": lr / by, "eps": 1e-8 / by})
        return ADAMW([group for group in made if group["params"]], lr=lr)


def test_it_is_the_twins(world: Any) -> None:
    cases = [BASE | each for each in LAYOUTS]
    results = world(4).run(run_cases, cases, STEPS)
    for i, case in enumerate(cases):
        twin = Wide(case["tied"], case["layers"], case["rows"], sizes=MUP, s=case["s"])
        losses, _ = twin.train(STEPS, case["lr"], 0.0, case=case, make=twin.optimizer)
        for rank in (each[i] for each in results):
            assert rank["losses"] == pytest.approx(losses, rel=1e-11), case
            for name, dim, start, local in rank["grads"]:
                want = twin.w[name].grad.narrow(dim, start, local.shape[dim])
                assert (torch.from_numpy(local) - want).norm() <= 1e-9 * twin.w[name].grad.norm()


def built(**more: Any) -> pretrain_llama.LlamaRun:
    config = run_config(BASE | more)
    return pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())


def test_matrices_of_blocks_are_drawn_narrower() -> None:
    plain, wide = built(sizes={}), built()
    every = dict(unique_parameters(plain.model))
    for name, param in unique_parameters(wide.model):
        by = 2.0 if "layers." in name and param.dim() > 1 else 1.0
        torch.testing.assert_close(param * by, every[name], rtol=1e-6, atol=0, msg=name)


def test_hugging_face_calls_it_granite() -> None:
    transformers = pytest.importorskip("transformers")
    run = built(sizes=MUP | dict(use_rope_scaling=False))
    fields = {k: v for k, v in hf_config(run.model.config).items() if k != "torch_dtype"}
    assert fields["model_type"] == "granite"
    theirs = transformers.GraniteForCausalLM(transformers.GraniteConfig(**fields)).double()
    file, weights = load_model_file("model/llama.py"), {}
    for name, param in unique_parameters(run.model):
        for piece in placement_of(param).pieces(file.hf_names(run.model)[name]):
            weights[piece.name] = param.detach().narrow(piece.dim, piece.local, piece.size)
    theirs.load_state_dict(weights)
    tokens = torch.randint(0, 97, (2, 12))
    with torch.no_grad():
        ours = run.model(tokens)[..., :97].transpose(0, 1)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-6, atol=1e-7)
    again = read_sizes(file, json.loads(json.dumps(hf_config(run.model.config))))
    kept = ("embedding_mult", "logits_divisor", "softmax_scale")
    assert [getattr(again, n) for n in kept] == [getattr(run.model.config, n) for n in kept]


@pytest.mark.parametrize("file", ["llama", "qwen2", "qwen3", "moe"])
def test_the_base_model_is_the_standard_one(file: str) -> None:
    """But for attention, unless the base head's size is given."""
    made = load_model_file(f"model/{file}.py")
    sizes = config_of(made, dict(
        vocab_size=100, hidden_size=64, ffn_hidden_size=96, num_layers=2, num_attention_heads=4,
        num_query_groups=2, kv_channels=16,
    ))  # fmt: skip
    found = made.with_mup(sizes, MuP(64, base_head_dim=16))
    assert found.sizes == sizes and set(found.divisors.values()) == {1.0}
    assert made.with_mup(sizes, MuP(64)).sizes.softmax_scale == 1 / 16
    assert with_mup(sizes, MuP(16, output_mult=0.5)).sizes.logits_divisor == 2.0


def test_a_file_that_does_not_say_its_widths_is_refused() -> None:
    with pytest.raises(ValueError, match="arcee.py has no with_mup, which says which sizes"):
        built(file="examples/forks/arcee.py")


def test_muons_matrices_keep_their_rate() -> None:
    divisors = {"matrix": M, "matrix_no_decay": M}
    for optimizer, by in (("adam", M), ("muon", 1.0)):
        groups = optimizer_groups(run_config(BASE | dict(optimizer=optimizer)), divisors)
        assert groups["matrix"].divisor == by and groups["embedding"].divisor == 1.0


@pytest.mark.parametrize(
    "there, here, words",
    [
        ({}, {"logits_scaling": 4.0}, "trained without the multipliers of muP"),
        ({"logits_scaling": 4.0}, {}, "trained with the multipliers of muP"),
        ({"logits_scaling": 2.0}, {"logits_scaling": 4.0}, "--mup-base-hidden-size"),
    ],
)
def test_a_checkpoint_of_another_base_is_refused(
    there: dict[str, float], here: dict[str, float], words: str
) -> None:
    """Also of a model that keeps its model_type, as Qwen3 does."""
    found = object.__new__(Checkpoint)
    found.directory, found.state = Path("saved"), {"hf_config": {"model_type": "qwen3", **there}}
    with pytest.raises(MismatchError, match=words):
        found.check_model({"model_type": "qwen3", **here})


FEW = ["--widths", "64", "256", "--seeds", "1", "--steps", "2", "--tolerance", "0.15"]


def test_the_coordinate_check_passes_and_finds_a_lost_learning_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "coordinates.svg"
    assert coordinate_check.main([*FEW, "--output", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    whole = pretrain_llama.widths
    monkeypatch.setattr(pretrain_llama, "widths", lambda c: whole(c)._replace(divisors={}))
    assert coordinate_check.main(FEW) == 1
    said = capsys.readouterr().out
    assert "largest slope" in said
