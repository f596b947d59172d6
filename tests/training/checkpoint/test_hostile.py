# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and Hugging Face directories changed at random, with digests that fit: a sentence."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import pretrain_llama
from model.llama import LlamaConfig, from_hf_config, hf_config
from model.sizes import MOST
from tests.training.checkpoint.hostile import spoil_hf, spoil_step
from tests.training.flags.flag_fuzz import judge
from tools import checkpoint as tool
from training.checkpoint import CheckpointError
from training.checkpoint.manifest import check_index, tiles
from training.flags.megatron import known_flags
from training.settings.setting import integer

SHORT, LONG, BLOCK = 6, 120, 60
FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --mock-data --vocab-size 64 --device cpu --make-vocab-size-divisible-by 1""".split()
RUNS = {
    "resume": [*FLAGS, "--train-iters", "2"],
    "args": """--use-checkpoint-args --mock-data --train-iters 2 --lr 1e-3 --device cpu
        --seq-length 32 --dry-run""".split(),
    "schedule": [*FLAGS, "--train-iters", "2", "--use-checkpoint-opt-param-scheduler", "--dry-run"],
}
TOOLS = ["list run", "verify run", "show run --tensors", "diff run saved", "convert --load run "
         "--to-hf out", "consolidate run --save out", "prune run --keep-last-k 1",
         "convert --from-hf run --save out"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    here = Path.cwd()
    os.chdir(place)
    try:
        assert pretrain_llama.main([*FLAGS, "--train-iters", "1", "--save", "saved"]) == 0
        assert tool.main("convert --load saved --to-hf hf".split()) == 0
    finally:
        os.chdir(here)
    return place


def wrong(seed: int) -> str:
    """Make the case of a seed; return what is wrong with an answer, or ""."""
    rng = random.Random(seed)
    for name in ("run", "out"):
        shutil.rmtree(name, ignore_errors=True)
    if seed % 3:
        os.mkdir("run")
        spoil_step(Path("saved/step_00000001"), Path("run/step_00000001"), rng)
    else:
        spoil_hf(Path("hf"), Path("run"), rng)
    flags, words = RUNS[rng.choice(list(RUNS))], rng.choice(TOOLS).split()
    what = judge(lambda: pretrain_llama.main([*flags, "--load", "run"]), (0, 2))
    what = what or judge(lambda: tool.main(words), (0, 1, 2), tool="checkpoint")
    return what and f"{flags} {words}: {what}"


def check(seeds: range) -> None:
    found = {seed: what for seed in seeds if (what := wrong(seed))}
    assert not found, "\n\n".join(f"seed {seed}: {what}" for seed, what in found.items())


def test_directories_changed_at_random(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    check(range(SHORT))


@pytest.mark.prove
@pytest.mark.parametrize("first", range(SHORT, SHORT + LONG, BLOCK))
def test_many_directories_changed_at_random(
    first: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    check(range(first, first + BLOCK))


def entry(shape: list[int], parts: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "parts": parts}}


def part(starts: list[Any], sizes: list[Any], file: Any = "f") -> list[Any]:
    return [file, "t", starts, sizes]


ABSURD = [
    entry([2**62] * 400_000, [part([0] * 400_000, [2**62] * 400_000)]),
    entry([2] * 9, [part([0] * 9, [2] * 9)]),
    entry([4], [part([0], [2]), part([0], [2])]),
    entry([4, 4], [part([0, 0], [2, 4]), part([1, 0], [3, 4])]),
    entry([4.0], [part([0], [4])]),
    entry([4], [part([0], [4], file=["f"])]),
    entry([4], [part([0], [4])], dtype="I8"),
]


@pytest.mark.parametrize("index", ABSURD, ids=range(len(ABSURD)))
def test_an_absurd_index_is_refused_at_once(index: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="index.json: bad entry for the tensor 't'"):
        check_index(index, {"files": {"f": {}}})


def test_rectangles_that_tile_and_that_do_not() -> None:
    """Hold the corners' sum against a count of every element."""
    rng = random.Random(0)
    seen = set()
    for _ in range(3000):
        shape = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
        boxes = []
        for _ in range(rng.randrange(4)):
            starts = [rng.randrange(n) for n in shape]
            boxes.append(
                (starts, [rng.randrange(n - a + 1) for n, a in zip(shape, starts, strict=True)])
            )
        if rng.random() < 0.5 and shape:  # cut the whole in two
            at = rng.randrange(shape[0] + 1)
            boxes = [([0] * len(shape), [at, *shape[1:]])]
            boxes += [([at] + [0] * (len(shape) - 1), [shape[0] - at, *shape[1:]])]
        cells = [(i, j) for i in range(([*shape, 1, 1])[0]) for j in range(([*shape, 1, 1])[1])]
        flat = [([*a, 0, 0][:2], [*n, 1, 1][:2]) for a, n in boxes]
        once = all(
            sum(a[0] <= i < a[0] + n[0] and a[1] <= j < a[1] + n[1] for a, n in flat) == 1
            for i, j in cells
        )
        assert tiles(shape, boxes) == once
        seen.add(once)
    assert seen == {True, False}


SIZES = hf_config(LlamaConfig(64, 32, 64, 2, 4, 2))
BAD_SIZES = [
    ("num_attention_heads", "4"),
    ("num_attention_heads", 0),
    ("num_hidden_layers", 10**9),
    ("num_key_value_heads", 3),
    ("head_dim", 2**63),
    ("vocab_size", 2**32),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", "1e-5"),
    ("max_position_embeddings", 0.5),
]


@pytest.mark.parametrize(("field", "value"), BAD_SIZES, ids=map(str, BAD_SIZES))
def test_sizes_of_no_model_are_refused_by_name(field: str, value: Any) -> None:
    assert from_hf_config(SIZES)
    with pytest.raises(ValueError, match=field):
        from_hf_config({**SIZES, field: value})


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 5: it must be a divisor of hid"):
        LlamaConfig(64, 32, 64, 2, 5, 5)


def test_flags_and_configs_have_the_same_bounds() -> None:
    for name, most in MOST.items():
        flag = known_flags().get("--" + name.replace("_", "-"))
        if name != "rope_original_length":
            assert flag is not None and flag.rule == integer(1, most), name
