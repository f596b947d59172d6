# SPDX-License-Identifier: Apache-2.0
"""Folders of weights in the forms that people have, played against transformers.

    python -m tests.tools.weight_folders --count 300 --seed 1

A form is a value of each axis below: which files there are, under which names the tensors are, what
else is there. The right value is what AutoModelForCausalLM.from_pretrained loads: its logits.
Where it draws a weight anew, since the folder has none, a refusal is right. `MAY_REFUSE` lists what
is refused although transformers loads something, with a word of the sentence.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpu.grid import Grid
from tools.checkpoints.convert_huggingface import import_hf
from tools.generate import load_model

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
TINY = dict(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=8)
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": EXPERTS | dict(num_experts=4, norm_topk_prob=True),
    "Dots1": EXPERTS | dict(n_routed_experts=4, n_shared_experts=1, norm_topk_prob=True,
                            first_k_dense_replace=1, sliding_window=None),
}  # fmt: skip
AXES: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "tied": ("no", "yes"),
    "files": ("single", "shards", "single over older shards", "shards over older single", "named",
              "named index",
              "older .bin next to it", "variant next to it", "only a variant", "only .bin",
              "only shards, no index", "only consolidated", "only an adapter",
              "a snapshot in the cache", "only DeepSpeed's", "only FSDP's", "only TensorFlow's"),
    "names": ("plain", "base", "twice", "mixed", "_orig_mod.", "module.", "inner _orig_mod"),
    "ends": ("as saved", "head alone", "both", "both, another dtype", "both, different", "neither"),
    "extra": ("none", "inv_freq of layers", "inv_freq", "cos_cached", "a value head",
              "a layer too many", "adapter_config.json", "a distributed part"),
    "dtype": ("float32", "bfloat16", "float16", "norms in float32", "integers"),
    "index": ("whole", "no metadata", "a name too many", "a name forgotten", "in another shard",
              "a shard missing", "an unlisted shard", "of a subfolder", "an overlay",
              "an older overlay"),
    "header": ("format pt", "no metadata"),
    "experts": ("each", "fused", "under mlp"),
}  # fmt: skip
MAY_REFUSE = {  # what transformers loads and we do not
    ("ends", "both, different"): "differs from",
    ("extra", "a value head"): "is not a tensor of the",
    ("extra", "a layer too many"): "is not a tensor of the",
    ("extra", "adapter_config.json"): "adapter",  # with peft it loads another model
    ("extra", "a distributed part"): "a distributed save",
    ("dtype", "integers"): "is I32; only",
    ("files", "only .bin"): "pickles",
    ("index", "of a subfolder"): "not the plain name",
    ("index", "an older overlay"): "both hold",  # transformers does not take what the index says
}
SAVES = {"only DeepSpeed's": "global_step10", "only FSDP's": "pytorch_model_fsdp_0",
         "only TensorFlow's": "tf_model.h5"}  # fmt: skip
Form = dict[str, str]


def plain(model: str = "Llama") -> Form:
    """Return the form that save_pretrained writes."""
    return {axis: values[0] for axis, values in AXES.items()} | {"model": model}


def forms(seed: int, count: int) -> Iterator[Form]:
    """Yield every value of every axis once, in a tied and an untied Llama and a Mixtral, then forms
    drawn from all axes, of which most values are plain.
    """
    for start in (plain(), plain() | {"tied": "yes"}, plain("Mixtral")):
        for axis, values in AXES.items():
            for value in values[1:]:
                yield start | {"files": "shards" if axis == "index" else "single", axis: value}
    draw = random.Random(seed)
    for _ in range(count):
        form = {"model": draw.choice(AXES["model"]), "tied": draw.choice(AXES["tied"])}
        for axis, values in list(AXES.items())[2:]:
            form[axis] = draw.choice(values) if draw.random() < 0.25 else values[0]
        yield form


@cache
def saved(model: str, tied: str, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config.json and the tensors of a random model of transformers."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{model}Config")(
        **TINY, **MODELS[model], tie_word_embeddings=tied == "yes"
    )
    made = getattr(transformers, f"{model}ForCausalLM")(config).float()
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        at = Path(folder)
        return json.loads((at / "config.json").read_text()), load_file(at / "model.safetensors")


def tensors_of(form: Form, seed: int = 1) -> dict[str, Tensor]:
    """Return the tensors of a form, under its names."""
    _, tensors = saved(form["model"], form["tied"], seed)
    tensors = fuse(dict(tensors), form)
    if form["dtype"] not in ("float32", "integers"):
        narrow = torch.bfloat16 if form["dtype"].startswith("norms") else None
        narrow = narrow or getattr(torch, form["dtype"])
        keep = "norm" if form["dtype"].startswith("norms") else "correction_bias"
        tensors = {n: t if keep in n else t.to(narrow) for n, t in tensors.items()}
    if form["dtype"] == "integers":
        tensors[NORM] = tensors[NORM].to(torch.int32)
    embedding, ends = tensors[EMBEDDING], form["ends"]
    if ends != "as saved":
        head = tensors.pop(HEAD, embedding)
        if ends == "head alone":
            del tensors[EMBEDDING]
            tensors[HEAD] = head
        elif ends == "neither":
            del tensors[EMBEDDING]
        elif ends == "both, different":
            tensors[HEAD] = embedding + 1
        else:
            wider = torch.float64 if ends.endswith("dtype") else embedding.dtype
            tensors[HEAD] = embedding.to(wider).clone()
    few = torch.rand(4)
    more = {
        "inv_freq of layers": {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": few.clone()
                               for i in range(2)},
        "inv_freq": {"model.rotary_emb.inv_freq": few},
        "cos_cached": {"model.layers.0.self_attn.rotary_emb.cos_cached": few},
        "a value head": {"v_head.summary.weight": few},
        "a layer too many": {"model.layers.2.input_layernorm.weight": few},
    }.get(form["extra"], {})  # fmt: skip
    return {renamed(n, i, form["names"]): t for i, (n, t) in enumerate((tensors | more).items())}


def fuse(tensors: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Put experts under other names, or those of a layer in two tensors, as transformers 5 does."""
    if form["experts"] == "under mlp":
        return {n.replace(".block_sparse_moe.", ".mlp."): t for n, t in tensors.items()}
    if form["experts"] == "fused" and form["model"] in ("Mixtral", "Qwen3Moe", "Dots1"):
        modules = ("w1", "w3", "w2")
        if form["model"] != "Mixtral":
            modules = ("gate_proj", "up_proj", "down_proj")
        for i in range(2):
            at = f"model.layers.{i}.{'block_sparse_moe' if modules[0] == 'w1' else 'mlp'}.experts"
            rows = [[tensors.pop(f"{at}.{e}.{m}.weight", None) for m in modules] for e in range(4)]
            if rows[0][0] is not None:
                to = f"model.layers.{i}.mlp.experts"
                tensors[f"{to}.gate_up_proj"] = torch.stack([torch.cat(r[:2]) for r in rows])
                tensors[f"{to}.down_proj"] = torch.stack([r[2] for r in rows])
    return tensors


def renamed(name: str, i: int, how: str) -> str:
    """Return a name in a form. Experts of a layer keep one prefix in all: transformers merges them
    in the order of their stored names, so that a mixture would deal them out anew.
    """
    if how == "base" or how == "mixed" and i % 2 and ".experts." not in name:
        return name.removeprefix("model.")
    if how == "inner _orig_mod":
        return name.replace("model.", "model._orig_mod.", 1)
    return ("model." if how == "twice" else "" if how in ("plain", "mixed") else how) + name


def write(form: Form, at: Path) -> None:
    """Write a form's folder."""
    at.mkdir()
    config, _ = saved(form["model"], form["tied"], 1)
    files, tensors = form["files"], tensors_of(form)
    older = tensors_of(form, seed=2)
    if files == "named":
        config = config | {"transformers_weights": "weights-a.safetensors"}
        single(at / "weights-a.safetensors", tensors, form)
        single(at / "model.safetensors", older, form)
    elif files == "named index":
        config = config | {"transformers_weights": "other.safetensors.index.json"}
        shards(at, tensors, form)
        (at / INDEX).rename(at / "other.safetensors.index.json")
        single(at / "model.safetensors", older, form)
    elif files == "shards":
        shards(at, tensors, form)
    elif files == "single over older shards":
        shards(at, older, form)
        single(at / "model.safetensors", tensors, form)
    elif files == "shards over older single":
        single(at / "model.safetensors", tensors, form)
        shards(at, older, form)
    elif files == "only .bin":
        torch.save(tensors, at / "pytorch_model.bin")
    elif files in SAVES:
        (at / SAVES[files]).mkdir()
    elif files == "a snapshot in the cache":
        shards(at, tensors, form)
        blobs = at.with_name(f"{at.name}-blobs")
        blobs.mkdir()
        for i, file in enumerate(list(at.iterdir())):
            file.rename(blobs / str(i))
            file.symlink_to(Path("..") / blobs.name / str(i))
    elif files == "only shards, no index":
        shards(at, tensors, form)
        (at / INDEX).unlink()
    elif files.startswith("only"):
        of = {"only a variant": "model.fp16", "only consolidated": "consolidated.00"}
        single(at / f"{of.get(files, 'adapter_model')}.safetensors", tensors, form)
    else:
        single(at / "model.safetensors", tensors, form)
    if files == "older .bin next to it":
        torch.save(older, at / "pytorch_model.bin")
    if files == "variant next to it":
        single(at / "model.fp16.safetensors", older, form)
    if files == "only an adapter" or form["extra"] == "adapter_config.json":
        (at / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    if form["extra"] == "a distributed part":
        single(at / "shard-00001-model-00001-of-00001.safetensors", older, form)
    (at / "config.json").write_text(json.dumps(config))


def single(path: Path, tensors: dict[str, Tensor], form: Form) -> None:
    metadata = {"format": "pt"} if form["header"] == "format pt" else None
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata)


def shards(at: Path, tensors: dict[str, Tensor], form: Form) -> None:
    """Write three shards and their index."""
    names, how = list(tensors), form["index"]
    file = "model-{:05d}-of-00003.safetensors".format
    where = {name: file(1 + i % 3) for i, name in enumerate(names)}
    for i in range(3):
        if not (how == "a shard missing" and i == 1):
            mine = {n: tensors[n] for n in names if where[n] == file(1 + i)}
            single(at / file(1 + i), mine, form)
    if how == "an unlisted shard":
        single(at / file(9), {n: t * 0 for n, t in tensors.items()}, form)
    if how == "a name too many":
        where["model.layers.9.mlp.up_proj.weight"] = file(1)
    if how == "a name forgotten":
        del where[names[0]]
    if how == "in another shard":
        where[names[0]] = file(2)
    if "overlay" in how:  # of the same names as in a shard; transformers takes the last file's
        newer = {n: t + 1 if t.is_floating_point() else t for n, t in list(tensors.items())[:2]}
        single(at / "model-overlay.safetensors", newer, form)
        where |= dict.fromkeys(newer, "model-overlay.safetensors")
        if how == "an older overlay":
            where[names[0]] = file(1)
    if how == "of a subfolder":
        (at / "sub").mkdir()
        (at / file(2)).rename(at / "sub" / file(2))
        where = {n: f"sub/{f}" if f == file(2) else f for n, f in where.items()}
    index = {"weight_map": where, "metadata": {"total_size": 1}}
    (at / INDEX).write_text(json.dumps(index))


def theirs(at: Path, tokens: Tensor) -> Tensor | None:
    """Return the logits of transformers, None where it fails or draws a weight anew."""
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            at, dtype=torch.float32, output_loading_info=True
        )
    except BaseException as error:  # a distributed load's is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None  # whatever it says, there is no right value
    if found["missing_keys"] or found["mismatched_keys"]:
        return None
    return model(tokens).logits


def play(form: Form, at: Path) -> tuple[str, str]:
    """Write a form and read it on both sides; return "right", "refused" or "wrong", and why."""
    write(form, at)
    tokens, found = torch.arange(48).view(2, 24) % 61, list[Tensor]()
    with torch.no_grad():
        wanted = theirs(at, tokens)
        index = at / INDEX
        if form["index"] == "no metadata" and index.exists():  # a KeyError in transformers
            index.write_text(
                json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]})
            )
        try:
            for place in (at, at / "imported"):  # as --load reads it, and convert --from-hf
                model, _ = load_model(str(place), Grid(), torch.device("cpu"), torch.float32)
                found.append(model(tokens)[..., :61].transpose(0, 1))
                if place == at:
                    import_hf(at, at / "imported")
        except (ValueError, OSError) as error:
            why = str(error)
            given = [word for (axis, v), word in MAY_REFUSE.items() if form[axis] == v]
            if found or "\n" in why or str(at) not in why:
                return "wrong", f"no sentence, or in one way only: {why}"
            if wanted is not None and not any(word in why for word in given):
                return "wrong", f"refused although it is right: {why}"
            has_none = "" if wanted is not None else "transformers has no value either; "
            return "refused", has_none + why.replace(str(at), "DIR")
        except Exception as error:
            return "wrong", f"{type(error).__name__}: {error}"
    if wanted is None:
        return "wrong", "loaded, where transformers has no right value"
    off = max((ours - wanted).norm() / wanted.norm() for ours in found).item()
    return ("right", "") if off < 1e-5 else ("wrong", f"logits differ by {off:.3g}")


def played(seed: int, count: int) -> Iterator[tuple[Form, str, str]]:
    """Yield each form that is played, its outcome and why."""
    with tempfile.TemporaryDirectory() as folder:
        for i, form in enumerate(forms(seed, count)):
            yield form, *play(form, Path(folder) / str(i))


def unusual(form: Form) -> str:
    """Return what of a form is not as save_pretrained writes it, and the model."""
    return ", ".join(v for axis, v in form.items() if axis == "model" or v != AXES[axis][0])


def main(argv: list[str] | None = None) -> int:
    """Play forms and print how many were right, refused and wrong; return 1 where one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    args = parser.parse_args(argv)
    outcomes, nowhere = Counter[str](), 0
    for form, outcome, why in played(args.seed, args.count):
        outcomes[outcome] += 1
        nowhere += why.startswith("transformers has no value")
        if outcome != "right":
            print(f"{outcome}  {unusual(form)}: {why}", flush=True)
    import transformers

    print(
        f"{outcomes.total()} forms against transformers {transformers.__version__}: "
        f"{outcomes['right']} right, {outcomes['refused']} refused ({nowhere} of which "
        f"transformers has no value for), {outcomes['wrong']} wrong"
    )
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
