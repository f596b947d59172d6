# SPDX-License-Identifier: Apache-2.0
"""The worked forks, examples/forks, model/qwen2.py and model/qwen3.py.

Each trains and decodes as on one rank.

Those that transformers has too are held against it, with its weights in and out; the sliding
windows against a dense mask.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.load import load_model_file, read_sizes
from mpu.comm.collectives import all_gather
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.layers.fused import apply_rope
from mpu.param import draw_normal, placement_of, unique_parameters
from pretrain_llama import model_provider
from tests.model.test_qwen3_hf import SMALL, run
from tests.model.twin import SIZES, S, V, config_of, run_cases
from tools.forks.case import held
from tools.forks.case import whole as merged
from tools.generate import load_model
from training.run.model_profile import model_profile

ROOT = Path(__file__).resolve().parents[2]
MORE: dict[str, dict[str, Any]] = {  # what a fork's case has
    "windows": {"extra": (("window_size", 3),)},
    "gemma2": {"extra": (("sliding_window", 3), ("attn_logit_softcapping", 2.0))},
    "widths": {"sizes": {"ffn_hidden_size": 192}},
    "gemma3": {"extra": (("sliding_window", 3), ("sliding_window_pattern", 2))},
    "phi": {"extra": (("rotary_factor", 0.67),)},
    "glm4": {"extra": (("rotary_factor", 0.34),)},
}
FORKS = (
    "qwen2", "arcee", "windows", "widths", "olmo2", "gemma2", "gemma3", "phi", "phi3", "glm4",
    "bitnet", "granite", "embeddings",
)  # fmt: skip
ORACLES: dict[str, dict[str, Any]] = {  # what transformers has, and more of its config
    "Qwen2": {},
    "Arcee": {},
    "Olmo2": {},
    "Gemma2": {"query_pre_attn_scalar": 10, "sliding_window": 7},
    "Gemma3Text": {
        "query_pre_attn_scalar": 10, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Phi3": {"pad_token_id": 0},
    "Glm4": {"pad_token_id": 0},
    "BitNet": {},
    "Granite": dict(
        embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.5,
        logits_scaling=4.0,
    ),
}  # fmt: skip
WAYS = {  # of two ranks
    "tp 2": dict(tp=2, dp=1, m=1, sp=False),
    "tp 2 + SP": dict(tp=2, dp=1, m=1, sp=True),
    "pp 2": dict(tp=1, dp=1, m=3, pp=2, schedule="1f1b"),
    "dp 2, ZeRO 3": dict(tp=1, dp=2, m=1, zero=3, gather=True, recompute="full"),
}


@pytest.fixture(scope="module")
def paths() -> dict[str, str]:
    """Return {fork: path} of the worked forks."""
    found = {path.stem: str(path) for path in (ROOT / "examples" / "forks").glob("*.py")}
    found["qwen2"] = "model/qwen2.py"
    del found["deepseek"]  # test_deepseek.py
    assert sorted(found) == sorted(FORKS)
    return found


def case_of(fork: str, path: str, **way: Any) -> dict[str, Any]:
    tied = fork in ("widths", "gemma2", "gemma3")
    plain = dict(tp=1, dp=1, sp=False, recompute=None, m=1, tied=tied)
    return plain | dict(file=path, lr=1e-2, clip=0.5, masks=True) | MORE.get(fork, {}) | way


def equal(got: dict[str, Any], one: dict[str, Any], what: str) -> None:
    """Hold a rank's losses, norms and rectangles of the last gradient against one rank's."""
    assert got["losses"] == pytest.approx(one["losses"], rel=1e-10), what
    assert got["norms"] == pytest.approx(one["norms"], rel=1e-10), what
    parts: dict[str, list[torch.Tensor]] = {}  # of one rank: below one another
    for name, _, _, grad in one["grads"]:
        parts.setdefault(name, []).append(torch.from_numpy(grad))
    full = {name: torch.cat(rows) for name, rows in parts.items()}
    for name, dim, start, local in got["grads"]:
        wanted = full[name].narrow(dim, start, local.shape[dim])
        apart = (torch.from_numpy(local) - wanted).norm()
        assert apart <= 1e-10 * full[name].norm(), f"{what}: {name}"


@pytest.mark.parametrize(
    "way",
    [each if each == "tp 2 + SP" else pytest.param(each, marks=pytest.mark.prove) for each in WAYS],
)
def test_forks_train_on_two_ranks_as_on_one(world, paths, way):
    """Two steps of every fork: losses, norms, every gradient."""
    alone = [case_of(fork, paths[fork]) for fork in FORKS]
    ones = dict(zip(FORKS, world(1).run(run_cases, alone, 2)[0], strict=True))
    for fork, one in ones.items():
        assert one["losses"][1] != one["losses"][0], fork
    some = [case_of(fork, paths[fork], **WAYS[way]) for fork in FORKS]
    for rank in world(2).run(run_cases, some, 2):
        for (fork, one), got in zip(ones.items(), rank, strict=True):
            equal(got, one, f"{fork}, {way}")


def test_biases_where_two_ranks_share_a_head(world, paths):
    sizes = {"sizes": {"num_query_groups": 1, "kv_channels": 8}}
    one, two = (case_of("qwen2", paths["qwen2"], **sizes, **way) for way in ({}, WAYS["tp 2 + SP"]))
    (alone,) = world(1).run(run_cases, [one], 2)[0]
    assert any(name.endswith("k_proj.bias") for name, *_ in alone["grads"])
    for rank in world(2).run(run_cases, [two], 2):
        equal(rank[0], alone, "biases of a shared head")


def drawn(comm: Any, case: dict[str, Any]) -> Any:
    """Build a model of which every weight, those of norms and biases too, was drawn."""
    grid, config = comm.grid(comm.size), config_of(case)
    model = model_provider(config, LayerContext(grid, False, torch.float64, torch.float64))
    names = load_model_file(case["file"]).hf_names(model)
    for name, param in unique_parameters(model.initialize(3)):
        if param.dim() == 1:
            draw_normal(param, names[name], 0.3, 3)
            param.data += 1
    return model


def whole(logits: torch.Tensor, model: Any, size: int) -> torch.Tensor:
    """Gather logits [s, b, V/t] -> [b, s, V]."""
    every = all_gather(logits.permute(2, 1, 0).contiguous(), model.ctx.tp)[0]
    return every[:size].permute(1, 2, 0)


@torch.no_grad()
def decode_in(comm: Any, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Hold decoding in parts against one forward; return the logits of each case."""
    tokens, found = torch.arange(22).view(2, 11) * 7 % V, []
    for case in cases:
        model, caches = drawn(comm, case), [[] for _ in range(3)]
        at_once = model(tokens)
        cuts = ((0, 4), (4, 5), (5, 11))
        parts = [model.decode(tokens[:, a:b], a, caches) for a, b in cuts]
        assert (torch.cat(parts) - at_once).abs().max() < 1e-12 * at_once.abs().max(), case
        found.append(whole(at_once, model, V))
    return found


@pytest.mark.prove
def test_forks_decode_as_they_train(world, paths):
    cases = [case_of(fork, paths[fork]) for fork in FORKS]
    (one,) = world(1).run(decode_in, cases)
    for rank in world(2).run(decode_in, cases):
        for a, b in zip(one, rank, strict=True):
            assert (a - b).abs().max() < 1e-12 * a.abs().max()


def dense(qkv, cos, sin, heads, groups, mask, *, cache, window):
    """Core attention with a mask that is written out."""
    s, b, _ = qkv.shape
    q, k, v = apply_rope(qkv, cos, sin, heads, groups)
    k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) / q.shape[-1] ** 0.5
    for i in range(s):
        for j in range(s):
            if j > i or (window and i - j >= window):
                scores[:, :, i, j] = -torch.inf
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), v).flatten(2)


@torch.no_grad()
def windows_in(comm: Any, case: dict[str, Any]) -> tuple[list[int], float, float]:
    """Return the layers' windows, and how far the logits are from a dense mask's and from none."""
    model, tokens = drawn(comm, case), torch.arange(20).view(2, 10)
    logits, blocks = model(tokens), list(model.layers.values())
    windows = [block.attention.window for block in blocks]
    for block in blocks:
        block.attention.core = dense
    masked = model(tokens)
    for block in blocks:
        block.attention.window = 0
    far = [(logits - other).norm() / logits.norm() for other in (masked, model(tokens))]
    return windows, far[0].item(), far[1].item()


def test_windows_are_those_of_a_dense_mask(world, paths):
    (found,) = world(1).run(windows_in, case_of("windows", paths["windows"]))
    windows, from_mask, from_none = found
    assert windows == [3, 0, 3] and from_mask < 1e-12 and from_none > 1e-3


def test_a_window_is_planned_by_the_pairs_it_has(paths):
    """A triangle counts as half of its square, as causal attention does."""
    case = case_of("windows", paths["windows"])
    windowed, whole, last = model_profile(config_of(case), model_provider).layers
    less = S**2 - (4 * 3**2 + 3 * 2**2)  # 4 triangles of a window of 3, between them 3 of 2
    heads, d = SIZES["num_attention_heads"], SIZES["kv_channels"]
    assert windowed == last == whole - less * heads * 2 * d / S


@pytest.mark.prove
def test_an_own_flag_is_kept_by_checkpoints(launcher, paths, tmp_path):
    """Other windows are refused, and so is another model; the tools need the file's name."""
    own = f"--model-file {paths['windows']}"
    flags, saved = f"{SMALL} --train-iters 2", f"{tmp_path}/saved"
    windows = f"{flags} {own} --window-size 3"
    tp2 = "--tensor-model-parallel-size 2"
    run(launcher, 2, f"{windows} --save {saved} --save-interval 2 {tp2}")
    run(launcher, 1, f"{windows.replace('iters 2', 'iters 3')} --load {saved}")
    for other, sentence in {
        f"{flags} {own} --window-size 4": "window_size is 3 there and 4 here",
        flags: "model_type is 'windows' there and 'llama' here (--model-file or --num-experts)",
    }.items():
        assert sentence in run(launcher, 1, f"{other} --load {saved}", code=2).said(0)
    with pytest.raises(ValueError, match="it was trained with --model-file .*: give this flag too"):
        load_model(saved, Grid(), torch.device("cpu"), None)
    model, _ = load_model(saved, Grid(), torch.device("cpu"), None, paths["windows"])
    assert [block.attention.window for block in model.layers.values()] == [3, 0]


def test_widths_grow_with_depth(paths):
    config = config_of(case_of("widths", paths["widths"]))
    model = model_provider(config, LayerContext(device=torch.device("meta")))
    assert [layer.mlp.down.weight.shape[1] for layer in model.layers.values()] == [64, 128, 192]


def test_an_odd_part_of_a_head_is_refused(paths):
    case = case_of("glm4", paths["glm4"]) | {"extra": (("rotary_factor", 0.2),)}
    with pytest.raises(ValueError, match=r"rotary_size is \d+: it must be even, from 2 to the"):
        model_provider(config_of(case), LayerContext(device=torch.device("meta")))


@torch.no_grad()
def logits_in(comm: Any, root: str, file: str | None, tokens: torch.Tensor) -> torch.Tensor:
    """Load a Hugging Face directory cut over all ranks; return the logits [b, s, V]."""
    grid, device = comm.grid(comm.size), torch.device("cpu")
    model, _ = load_model(root, grid, device, torch.float32, file)
    return whole(model(tokens), model, model.config.vocab_size)


def theirs_of(kind: str, g: int = 2) -> Any:
    """Return a small random model of transformers, of which no weight is 0 or 1."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **dict(
            vocab_size=101, hidden_size=96, intermediate_size=136, num_hidden_layers=3, head_dim=24,
            num_attention_heads=4, num_key_value_heads=g, max_position_embeddings=64,
            initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            attn_implementation="eager",
        ) | ORACLES[kind]
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for param in theirs.parameters():
        if param.dim() == 1:
            param.data.normal_(1.0, 0.3)
    return theirs


@pytest.mark.parametrize("kind", ORACLES)
def test_logits_are_those_of_transformers(world, paths, tmp_path, kind):
    """On one rank and on two; at tp 2 a key head may be shared. And their weights come back."""
    torch.manual_seed(3)
    path = paths[kind.lower().removesuffix("text")]
    theirs = theirs_of(kind, 1 if kind == "Olmo2" else 2)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 101, (2, 40))
    with torch.no_grad():
        wanted = theirs(tokens).logits
    for size in (1, 2):
        for ours in world(size).run(logits_in, str(tmp_path), path, tokens):
            assert (ours - wanted).norm() < 1e-5 * wanted.norm()
    (back,) = world(1).run(saved_in, str(tmp_path), path)
    config, tensors = back
    made = {**config, "pad_token_id": None, "attn_implementation": "eager"}  # Phi-3's is 32000
    again = type(theirs)(type(theirs.config)(**made)).float().eval()
    given = dict(again.named_parameters())
    assert tensors.keys() == {name for name in given if name in tensors} and given.keys() <= {
        *tensors,
        "model.embed_tokens.weight",
    }
    again.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        assert (again(tokens).logits - wanted).norm() < 1e-6 * wanted.norm()


def test_yarn_scales_the_layers_without_a_window_alone(world, paths, tmp_path, monkeypatch):
    full = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "rope_theta": 1e6}  # fmt: skip
    near = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": full, "sliding_attention": near}
    monkeypatch.setitem(ORACLES["Gemma3Text"], "rope_parameters", ropes)
    theirs = theirs_of("Gemma3Text")
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 101, (2, 40))
    (ours,) = world(1).run(logits_in, str(tmp_path), paths["gemma3"], tokens)
    with torch.no_grad():
        wanted = theirs(tokens).logits
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()
    hf = theirs.config.to_dict() | {"rope_parameters": ropes | {"sliding_attention": full}}
    with pytest.raises(ValueError, match="positions of layers with a window cannot be scaled"):
        read_sizes(load_model_file(paths["gemma3"]), hf)


@torch.no_grad()
def saved_in(comm: Any, root: str, file: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Load a Hugging Face directory; return config.json and weights as a checkpoint has them."""
    model, _ = load_model(root, comm.grid(1), torch.device("cpu"), torch.float32, file)
    fork = load_model_file(file)
    names = fork.hf_names(model)
    found = merged(
        (piece, held(param, piece))
        for name, param in unique_parameters(model)
        for piece in placement_of(param).pieces(names[name])
    )
    return fork.hf_config(model.config), found
