# SPDX-License-Identifier: Apache-2.0
"""Folders of weights are read as transformers reads them, or refused in a sentence."""

import re
import sys
from pathlib import Path

import pytest

from tests.tools.weight_folders import main, plain, play, saved
from training.run.export import not_for_transformers

EMBEDDING, TIED = "model.embed_tokens.weight", {"tied": "yes"}
FORMS = {
    "one file over older shards": ("Llama", {"files": "single over older shards"}, ""),
    "shards over one older file": ("Llama", TIED | {"files": "shards over older single"}, ""),
    "a tied model's head alone": ("Llama", TIED | {"ends": "head alone"}, ""),
    "a tied base model": ("Llama", TIED | {"names": "base"}, ""),
    "a tied base model of experts": ("Mixtral", TIED | {"names": "base", "experts": "fused"}, ""),
    "an index that forgot a name": ("Llama", {"files": "shards", "index": "a name forgotten"}, ""),
    "a snapshot in Hugging Face's cache": ("Llama", {"files": "a snapshot in the cache"}, ""),
    "DeepSpeed's folder": ("Llama", {"files": "only DeepSpeed's"}, "global_step10: DeepSpeed's"),
    "FSDP's folder": ("Llama", {"files": "only FSDP's"}, "model_fsdp_0: a distributed save"),
    "an overlay of shards": ("Llama", {"files": "shards", "index": "an overlay"}, ""),
    "an overlay that the index passes over": (
        "Llama", {"files": "shards", "index": "an older overlay"}, "both hold"
    ),
    "a compiled model": (
        "Llama", {"names": "_orig_mod."},
        f"no {EMBEDDING}; there is _orig_mod.{EMBEDDING}: save the model without its wrapper "
        "('_orig_mod.')",
    ),
    "a compiled base model": (
        "Llama", {"names": "inner _orig_mod"},
        f"no {EMBEDDING}; closest names: model._orig_mod.embed_tokens.weight",
    ),
    "an untied model's head alone": (
        "Llama", {"ends": "head alone"},
        f"no {EMBEDDING}; there is lm_head.weight, which config.json does not tie to it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FORMS)
def test_what_people_have(tmp_path: Path, what: str) -> None:
    model, form, sentence = FORMS[what]
    outcome, why = play(plain(model) | form, tmp_path / "hf")
    assert (outcome, sentence in why) == ("refused" if sentence else "right", True), why


@pytest.mark.parametrize("model", ["Mixtral", "Qwen3Moe", "Dots1"])
def test_transformers_is_said_to_load_a_mixture_that_it_loads(model: str) -> None:
    config, tensors = saved(model, "no", 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert not_for_transformers(config, shapes) == ""
    shapes["model.norm.bias"] = (16,)
    assert "model.norm.bias" in not_for_transformers(config, shapes)


def test_transformers_that_cannot_be_imported_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is installed, and refuses another package's version while it is imported."""
    (tmp_path / "transformers").mkdir()
    text = "raise ImportError('huggingface-hub>=1.0 is required')"
    (tmp_path / "transformers" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    why = not_for_transformers({"model_type": "llama"}, {})
    assert "transformers cannot be imported (huggingface-hub>=1.0 is required)" in why


@pytest.mark.prove
def test_no_form_is_read_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "150"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    counts = [
        int(n) for n in re.findall(r"\d+(?= right| refused| of which| wrong)|(?<=\()\d+", last)
    ]
    right, refused, nowhere, wrong = counts
    assert right > 120 and refused - nowhere < 90 and wrong == 0, last
