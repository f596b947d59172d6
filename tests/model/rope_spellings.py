# SPDX-License-Identifier: Apache-2.0
"""Rotary positions as a config.json spells them, and what transformers makes of each.

What a version of transformers that is not installed here answers is kept in
tests/model/rope_transformers_4.json. To make it again, here and then in an environment with that
version, which needs nothing of Weft:

    python tests/model/rope_spellings.py forms forms.json
    python tests/model/rope_spellings.py ask forms.json tests/model/rope_transformers_4.json
"""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Form = dict[str, Any]  # fields of a config.json that speak of rotary positions, and model_type
ORIGINAL = "original_max_position_embeddings"
HEAD = 16  # size of a head
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": HEAD,
    "max_position_embeddings": 128,
}  # fmt: skip
# what a model's type needs besides, and never speaks of positions
TYPES: dict[str, Form] = {
    "llama": {},
    "granite": {"attention_multiplier": 0.25},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "sliding_window": None, "moe_intermediate_size": 32,
    },
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEN = [1.0 + 0.1 * i for i in range(HEAD // 2)]
# (name of the type, what stands beside it)
KINDS: list[tuple[Any, Form]] = [
    ("default", {}),
    (..., {}),  # no name
    (..., {"factor": 2.0}),
    ("default", {"factor": 2.0, "attention_factor": 2.0}),
    (None, {"factor": 4.0}),
    ("linear", {"factor": 4.0}),
    ("linear", {"factor": 1.0}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", LLAMA3),
    ("llama3", {"factor": 32, "low_freq_factor": 1, "high_freq_factor": 4}),
    ("llama3", LLAMA3 | {"low_freq_factor": 2.0}),
    ("llama3", LLAMA3 | {"factor": 1.0}),
    ("llama3", LLAMA3 | {"factor": 0}),
    ("llama3", LLAMA3 | {"attention_factor": 2.0, "beta_fast": 3.0}),
    ("llama3", {"factor": 8.0}),
    ("yarn", {"factor": 4.0}),
    ("yarn", {"factor": 2, "attention_factor": 1.0}),
    ("yarn", {"factor": 4.0, "attention_factor": 0.8, "mscale": 1.0, "mscale_all_dim": 0.5}),
    ("yarn", {"factor": 4.0, "attention_factor": 0.0}),
    ("yarn", {"factor": 4.0, "attention_factor": None, "mscale": None}),
    ("yarn", {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("yarn", {"factor": 8.0, "mscale": 0.707, "mscale_all_dim": 1.2}),
    ("yarn", {"factor": 8.0, "mscale": 0.707}),
    ("yarn", {"factor": 4.0, "truncate": False, "beta_fast": 4, "beta_slow": 0.5}),
    ("yarn", {"factor": 4.0, "truncate": None, "beta_fast": 4.0}),
    ("yarn", {"factor": 4.0, "beta_fast": None, "beta_slow": 0}),
    ("yarn", {"factor": None}),
    ("yarn", {}),
    ("longrope", {"factor": 4.0, "short_factor": TEN, "long_factor": TEN}),
    ("proportional", {"factor": 2.0}),
    ("su", {"factor": 4.0, "short_factor": TEN, "long_factor": TEN}),
    ("YARN", {"factor": 4.0}),
]
NAMED = ("rope_type", "type", "both", "contradicting")
PLACES = (
    "rope_parameters", "rope_scaling", "rope_scaling, rope_parameters null",
    "rope_parameters, rope_scaling null", "rope_parameters, rope_scaling empty",
    "both", "full_attention in rope_parameters", "full_attention in rope_scaling",
)  # fmt: skip
# each at the top and inside; ...: absent
THETAS = [
    (..., ...), (500000.0, ...), (..., 500000.0), (10000.0, 500000.0), (1000000, 20000),
    (None, ...), (None, 500000.0), ("500000", ...), (0, ...),
]  # fmt: skip
LENGTHS = [(..., ...), (32, ...), (..., 64), (32, 64), (..., 32.0), (None, 64), (..., None)]
PARTS = [(..., ...), (0.5, ...), (..., 0.5), (1.0, ...), (0.5, 1.0), (None, ...)]


def forms(count: int) -> Iterator[Form]:
    """Yield `count` of all combinations, the same ones each time, half of them a Llama's."""
    draw = random.Random(51).choice
    axes = (KINDS, NAMED, PLACES, THETAS, LENGTHS, PARTS)
    for i in range(count):
        # every other one is spelled plainly but for one axis, so that most of them mean something
        plain = draw(range(1, len(axes))) if i % 2 else None
        picked = [draw(axis) for axis in axes]
        if plain is not None:
            picked = [
                p if n in (0, plain) else a[0]
                for n, (p, a) in enumerate(zip(picked, axes, strict=True))
            ]
        yield {"model_type": "llama" if i % 4 < 2 else draw([*TYPES]), **form(*picked)}


def form(kind: Any, named: str, place: str, theta: Any, length: Any, part: Any) -> Form:
    """Return one spelling."""
    name, beside = kind
    inside = {"rope_theta": theta[1], ORIGINAL: length[1], "partial_rotary_factor": part[1]}
    inside |= beside
    if named in ("rope_type", "both", "contradicting"):
        inside["rope_type"] = name
    if named in ("type", "both"):
        inside["type"] = name
    if named == "contradicting":
        inside["type"] = "default"
    inside = {k: v for k, v in inside.items() if v is not ...}
    top = {"rope_theta": theta[0], ORIGINAL: length[0], "partial_rotary_factor": part[0]}
    where, _, rest = place.partition(", ")
    if where == "both":
        top |= {"rope_scaling": inside, "rope_parameters": {"rope_theta": 7.0, "factor": 3.0}}
    elif where.startswith("full_attention"):
        top[where.rpartition(" ")[2]] = {"full_attention": inside}
    else:
        top[where] = inside
    if rest:
        top[rest.split()[0]] = None if rest.endswith("null") else {}
    return {k: v for k, v in top.items() if v is not ...}


def whole(form: Form) -> Form:
    """Return a config.json with these rotary positions."""
    return {**SIZES, **TYPES[form["model_type"]], **json.loads(json.dumps(form))}


def asked(form: Form) -> list[float] | None:
    """Return the d/2 frequencies and the attention factor that the installed transformers makes of
    a config.json, or None where it fails, as with a rotation of another size than a head.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    kind = form["model_type"]
    file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    made = next(v for k, v in vars(file).items() if k.endswith("RotaryEmbedding"))
    try:
        rotary = made(transformers.CONFIG_MAPPING[kind](**whole(form)))
        at = torch.arange(2)[None]
        cos, _ = rotary(torch.zeros(1), at)
        if cos.shape[-1] != HEAD or not torch.isfinite(cos).all():
            return None
    except Exception:
        return None
    return [*rotary.inv_freq.tolist(), float(rotary.attention_scaling)]


def main() -> None:
    """Write forms, or what transformers answers to them."""
    if sys.argv[1] == "forms":
        from tests.model.test_rope_spellings import kept

        Path(sys.argv[2]).write_text(json.dumps(kept()))
        return
    import transformers

    every: list[Any] = []
    found = []
    for each in json.loads(Path(sys.argv[2]).read_text()):
        answer = asked(each)
        answer = answer and [float(f"{value:.7g}") for value in answer]
        if answer not in every:
            every.append(answer)
        found.append([each, every.index(answer)])
    lines = ",\n".join(json.dumps(row) for row in every)
    rows = ",\n".join(json.dumps(row) for row in found)
    text = f'{{"transformers": "{transformers.__version__}",\n"answers": [\n{lines}\n],\n'
    Path(sys.argv[3]).write_text(f'{text}"forms": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
