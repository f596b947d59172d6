# SPDX-License-Identifier: Apache-2.0
"""What a config.json says is computed as transformers computes it, passed over as it passes it
over, or refused by its field.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model import llama, moe, qwen2, qwen3
from model.load import load_model_file, model_file_of, of_checkpoint, read_sizes
from tests.model.rope_spellings import SIZES, TYPES, whole
from tests.sampling import sampled
from tools.forks.huggingface import compare
from training.checkpoint import MismatchError
from training.checkpoint.load import Checkpoint
from training.flags import model_sizes
from training.settings.config import UsageError

FILES: dict[str, Any] = {
    "llama": llama, "qwen2": qwen2, "qwen3": qwen3, "mixtral": moe, "qwen3_moe": moe,
    "dots1": moe, "granite": llama, "mistral": llama,
}  # fmt: skip


def as_published(kind: str) -> Any:
    """Return the file of a model whose hf_config writes this model_type."""
    file = FILES[kind]

    def hf_config(config: Any, dtype: str = "float32") -> dict[str, Any]:
        own = {"mistral": {"model_type": kind, "sliding_window": None}}.get(kind, {})
        return {**file.hf_config(config, dtype), **own}

    names = ("Model", "ModelConfig", "hf_names", "from_hf_config", "__file__")
    return SimpleNamespace(hf_config=hf_config, **{name: getattr(file, name) for name in names})


@pytest.mark.parametrize("kind", sampled([*FILES], 8))
def test_every_field_that_changes_transformers_logits_is_read_or_refused(kind: str) -> None:
    """In training, so with dropout and noise."""
    hf = whole({"model_type": kind}) | {"intermediate_size": 96, "hidden_size": 64}
    hf |= {"embedding_multiplier": 3.0, "logits_scaling": 2.0} if kind == "granite" else {}
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    findings, notes = compare(as_published(kind), read_sizes(FILES[kind], hf), tokens)
    assert not findings, findings
    assert len(notes) == 1 and notes[0].startswith("its logits agree with those of "), notes


NO_BIAS = ("mistral", "mixtral", "qwen2")
WINDOW = {"use_sliding_window": True, "sliding_window": 3}
SMALL_PRINT: list[tuple[str, dict[str, Any], str]] = [
    # model_type, fields, and the field that is refused: transformers computes with it
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ("dots1", {"attention_dropout": 0.1}, "attention_dropout"),
    ("qwen3", {"is_causal": False}, "is_causal"),
    ("llama", {"per_layer_config": {"0": {"intermediate_size": 64}}}, "per_layer_config"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor"),
    ("qwen2", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", "factor": 2.0}},
     "partial_rotary_factor"),
    ("mistral", {"sliding_window": 3}, "sliding_window"),
    ("qwen2", WINDOW | {"max_window_layers": 1}, "use_sliding_window"),
    ("qwen3", WINDOW | {"max_window_layers": 0}, "use_sliding_window"),
    ("qwen3_moe", WINDOW | {"max_window_layers": 2}, "use_sliding_window"),
    ("dots1", {"sliding_window": 3, "max_window_layers": 0}, "sliding_window"),
    ("granite", {"residual_multiplier": 0.5}, "residual_multiplier"),
]  # fmt: skip
PASSED_OVER: list[tuple[str, dict[str, Any]]] = [  # transformers computes the same without them
    ("llama", {"sliding_window": 3, "router_jitter_noise": 0.1, "logits_scaling": 8.0}),
    ("mistral", {"max_window_layers": 0, "embedding_multiplier": 3.0}),
    ("qwen2", WINDOW | {"max_window_layers": 2}),
    ("qwen3", {"sliding_window": 3, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
    ("dots1", {"sliding_window": 3, "max_window_layers": 2}),
    ("mixtral", {"router_jitter_noise": 0.0, "is_causal": True}),
    *((kind, {"attention_bias": True, "mlp_bias": True}) for kind in FILES if kind in NO_BIAS),
    *((kind, {"mlp_bias": True}) for kind in ("qwen3", "qwen3_moe", "dots1")),
    *((kind, WINDOW) for kind in ("llama", "granite", "dots1")),
    # a window that is no shorter than the longest sequence
    *((kind, WINDOW | {"sliding_window": SIZES["max_position_embeddings"], "max_window_layers": 0})
      for kind in FILES if kind not in ("llama", "granite")),
]  # fmt: skip


def logits(hf: dict[str, Any]) -> torch.Tensor | None:
    """Return those of transformers' model in training; None where it has no such model."""
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[hf["model_type"]](**json.loads(json.dumps(hf)))
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        torch.manual_seed(1)
        with torch.no_grad():
            found: torch.Tensor = model(torch.arange(9)[None], use_cache=False).logits
        return found
    except Exception:
        return None


@pytest.mark.parametrize(("kind", "fields", "refused"), SMALL_PRINT)
def test_what_transformers_computes_and_weft_does_not_is_refused_by_its_field(
    kind: str, fields: dict[str, Any], refused: str
) -> None:
    plain = whole({"model_type": kind})
    read_sizes(FILES[kind], plain)
    there, without = logits(plain | fields), logits(plain)
    assert without is not None and (there is None or not torch.equal(there, without))
    with pytest.raises(ValueError, match=f"^config.json: {refused} is "):
        read_sizes(FILES[kind], plain | fields)


@pytest.mark.parametrize(("kind", "fields"), PASSED_OVER)
def test_what_transformers_passes_over_is_passed_over(kind: str, fields: dict[str, Any]) -> None:
    plain = whole({"model_type": kind})
    there, without = logits(plain | fields), logits(plain)
    assert there is not None and without is not None and torch.equal(there, without)
    assert read_sizes(FILES[kind], plain | fields) == read_sizes(FILES[kind], plain)


def test_a_mistral_without_a_window_is_a_llama() -> None:
    """And one that does not say so has a window of 4096, in transformers."""
    hf = whole({"model_type": "mistral"})
    assert model_file_of(hf) is llama
    assert llama.hf_config(llama.from_hf_config(hf))["model_type"] == "llama"
    del hf["sliding_window"]
    hf["max_position_embeddings"] = 4097  # a window of 4096 would cut nothing of shorter ones
    with pytest.raises(ValueError, match="^config.json: sliding_window is 4096"):
        llama.from_hf_config(hf)


def test_a_granite_that_does_not_say_its_attention_multiplier_has_1() -> None:
    hf = whole({"model_type": "granite"})
    del hf["attention_multiplier"]
    assert llama.from_hf_config(hf).softmax_scale == 1.0
    there, said = logits(hf), logits(hf | {"attention_multiplier": 1.0})
    assert there is not None and said is not None and torch.equal(there, said)


def saved(hf: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint of a model."""
    found = object.__new__(Checkpoint)
    found.directory, found.state = Path("saved"), {"hf_config": json.loads(json.dumps(hf))}
    return found


NUMBERS: list[tuple[str, Any, Any]] = [  # two spellings of one number: 1 / sqrt(128) and 128^-0.5
    ("attention_multiplier", 1 / math.sqrt(128), 128**-0.5),
    ("attention_multiplier", 0.08838834764831845, 0.0883883461356163),
    ("rms_norm_eps", 1e-5, 9.999999747378752e-06),  # as fp32
    ("rope_theta", 500000, 500000.0),
    ("rope_scaling", {"factor": 4, "attention_factor": 0.1 * math.log(4) + 1},
     {"factor": 4.0, "attention_factor": 1.1386294361119892}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "there", "here"), NUMBERS)
def test_a_number_that_differs_by_its_rounding_is_the_same(
    field: str, there: Any, here: Any
) -> None:
    saved({field: there}).check_model({field: here})
    other = {"factor": 4.001} if isinstance(here, dict) else here * 1.001
    with pytest.raises(MismatchError, match=f"{field} is "):
        saved({field: there}).check_model({field: other})


@pytest.mark.parametrize(
    ("one", "other"), [(1, (1, 1)), (2, (1, 0)), (0, (0, 0)), (7, (1, 0))], ids=str
)
def test_moe_layer_freq_is_the_same_in_every_spelling(one: Any, other: Any) -> None:
    sizes = [moe.MoEConfig(64, 64, 64, 2, 4, 4, num_experts=4, moe_router_pre_softmax=True,
                           moe_layer_freq=freq) for freq in (one, other)]  # fmt: skip
    assert sizes[0] == sizes[1]
    hf = moe.hf_config(sizes[0])

    def respell(hf: dict[str, Any]) -> dict[str, Any]:
        return moe.hf_config(moe.from_hf_config(hf))

    for freq in (one, other):  # as an older version saved it
        saved(hf | {"moe_layer_freq": freq}).check_model(hf, respell)
    with pytest.raises(MismatchError, match="moe_layer_freq is "):
        saved(hf | {"moe_layer_freq": [0, 1]}).check_model(hf, respell)


@pytest.mark.parametrize(
    ("flag", "same", "other"),
    [("--moe-layer-freq", (1, 1), (1, 0)), ("--norm-epsilon", 9.999999747378752e-06, 1e-6)],
)
def test_a_flag_may_spell_a_value_otherwise_than_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, flag: str, same: Any, other: Any
) -> None:
    own = {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "num_local_experts": 4}
    state = {"hf_config": whole({"model_type": "mixtral"}) | own}
    found = SimpleNamespace(directory=Path("there"), state=state)
    monkeypatch.setattr(model_sizes, "newest", lambda *words: found)

    def read(value: Any) -> None:
        given = {"--load": "there", flag: value}
        model_sizes.from_checkpoint(given, of_checkpoint, [], {}, {})

    read(same)
    with pytest.raises(UsageError, match=f"{flag} .* contradicts --use-checkpoint-args"):
        read(other)


def test_the_types_that_are_compared_are_those_that_are_read() -> None:
    assert TYPES.keys() == FILES.keys()


FORKS = {  # model_type: a worked fork
    **{kind: kind for kind in ("arcee", "bitnet", "gemma2", "glm4", "olmo2", "phi", "phi3")},
    "gemma3_text": "gemma3", "deepseek_v2": "deepseek", "deepseek_v3": "deepseek",
}  # fmt: skip
PLAIN = {"sliding_window": None, "n_shared_experts": 1, "n_routed_experts": 4}
PLAIN |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MORE = {  # where transformers' defaults are no model, or one that is refused
    "mistral": {"sliding_window": None},
    "dots1": PLAIN | {"norm_topk_prob": True},
    "deepseek_v2": PLAIN | {"topk_method": "greedy"},
}


@pytest.mark.parametrize("kind", [*FILES, *FORKS])
def test_a_field_that_is_left_out_means_what_transformers_takes_it_for(kind: str) -> None:
    import transformers

    def meant(hf: dict[str, Any]) -> dict[str, Any]:
        made = transformers.CONFIG_MAPPING[kind](**hf).to_json_string(use_diff=False)
        return {**json.loads(made), "model_type": kind}

    def read(hf: dict[str, Any]) -> Any:
        sizes = read_sizes(file, hf)
        return replace(sizes, kv_channels=sizes.head_size)

    file = FILES.get(kind) or load_model_file(f"examples/forks/{FORKS[kind]}.py")
    hf, compared = meant(MORE.get(kind, {})), 0
    read(hf)
    for field in hf.keys() - {"model_type", "num_hidden_layers"}:  # layer_types is as long
        less = {name: value for name, value in hf.items() if name != field}
        try:
            found = read(less)
        except ValueError:  # it has to be there
            continue
        assert found == read(meant(less)), field
        compared += 1
    assert compared > 10
