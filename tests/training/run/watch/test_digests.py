# SPDX-License-Identifier: Apache-2.0
"""Digests: the same for layouts of equal bits, near for the others; a flipped bit changes them."""

import json
import struct
from pathlib import Path

import pytest
import torch

from model.load import load_model_file
from mpu import native
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.zero.digest import KINDS, StateDigest, add, keys, signs
from pretrain_llama import build
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.output import open_json

FLAGS = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8
    --group-query-attention --num-query-groups 2 --vocab-size 37 --make-vocab-size-divisible-by 8
    --mock-data --num-workers 0 --train-iters 3 --lr 1e-2 --device cpu --global-batch-size 8
    --micro-batch-size 2 --log-interval 1
""".split()
MASK = (1 << 64) - 1
TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CP = ["--context-parallel-size", "2"]
LAYOUTS = {  # ranks, flags, the layout with the same bits
    "one": (1, [], "one"),
    "pp 2": (2, ["--pipeline-model-parallel-size", "2"], "one"),
    "dp 2": (2, [], "dp 2"),
    "dp 2, ZeRO 3": (2, ["--zero-stage", "3"], "dp 2"),
    "tp 2": (2, TP, "tp 2"),
    "tp 2 x cp 2": (4, [*TP, *CP], "tp 2 x cp 2"),
}
SAMPLE = ("one", "pp 2")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "digests.jsonl").read_text().splitlines()]


def small_run():
    config = parse(FLAGS, 1)
    grid = Grid(1, 1, launch=Launch(0, 1, 0, 1))
    run = build(config, grid, torch.device("cpu"), FailureMonitor())
    return run, load_model_file(config.model.model_file).hf_names(run.model)


def test_a_digest_is_the_sum_that_the_page_says():
    run, table = small_run()
    state = StateDigest(run.grid, run.optimizer, table)
    name = "model.layers.1.self_attn.v_proj.weight"  # the third section of a fused weight
    param = run.model.layers["1"].attention.qkv.weight
    rows = param.detach()[24:32]
    number = state.names.index(name)
    row = [int(k) & MASK for k in keys(f"{name}/row", 0, 8, run.device)]
    column = [int(k) & MASK for k in keys(f"{name}/column", 0, 16, run.device)]
    total = 0
    for i in range(8):
        for j in range(16):
            (bits,) = struct.unpack("<i", struct.pack("<f", float(rows[i, j])))
            total += bits * row[i] * column[j]
    exact, sketch = state.run()
    assert exact[number, KINDS.index("weight")].item() & MASK == total & MASK
    signed = rows.double() * signs(keys(f"{name}/row", 0, 8, run.device), 1, torch.float64)[:, None]
    signed = signed * signs(keys(f"{name}/column", 0, 16, run.device), 1, torch.float64)
    want = [rows.double().norm(), signed.sum()]
    assert torch.allclose(sketch[number, 1, [0, 2]], torch.stack(want), rtol=1e-6)
    assert all(key % 2 for key in (*row, *column)) and len({*row, *column}) == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_library_and_torch_digest_alike(dtype, monkeypatch):
    x = torch.randn(70, 33, dtype=dtype)[:, 3:]  # rows that do not touch
    rows, columns = keys("a", 5, 70, x.device), keys("b", 0, 30, x.device)
    found = []
    for library in (native.load(), None):
        monkeypatch.setattr(native, "load", lambda library=library: library)
        exact, sums = torch.ones((), dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
        add(x, rows, columns, exact, sums)
        found.append((exact, sums))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_flipped_bit_changes_one_tensor_alone(bit):
    run, table = small_run()
    state = StateDigest(run.grid, run.optimizer, table)
    before, _ = state.run()
    weight = run.model.layers["0"].mlp.down.weight.detach()
    weight.view(torch.int32)[3, 5] ^= -(1 << 31) if bit == 31 else 1 << bit
    after, _ = state.run()
    found = (before != after).nonzero().tolist()
    assert found == [[state.names.index("model.layers.0.mlp.down_proj.weight"), 1]]


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(LAYOUTS, marks=pytest.mark.prove)])
def test_layouts(names, launcher):
    """Those with equal bits have equal lines; the sketches of the others are near."""
    found = {}
    for name in names:
        ranks, flags, _ = LAYOUTS[name]
        result = launcher.run(ranks, [*FLAGS, *flags, "--log-digests", "1"])
        assert result.codes == [0] * ranks, result.said(0)
        found[name] = lines_of(result.folder)
    head, *one = found["one"]
    assert head["format"] == "weft digests 1" and [line["iteration"] for line in one] == [1, 2, 3]
    assert [line["samples"] for line in one] == [[0, 8], [8, 8], [16, 8]]
    for name, (other_head, *lines) in found.items():
        assert lines == found[LAYOUTS[name][2]][1:], name
        assert other_head["names"] == head["names"] and other_head["world"] == LAYOUTS[name][0]
        for ours, theirs in zip(one, lines, strict=True):
            assert ours["batch"] == theirs["batch"] and ours["samples"] == theirs["samples"]
            for kind in KINDS:
                a, b = (torch.tensor(line[f"{kind} sketch"]) for line in (ours, theirs))
                assert ((a - b).abs() <= 1e-4 * a[:, :1]).all(), (name, kind)


def test_a_pipeline_rank_without_trained_weights_has_no_digest(launcher):
    frozen = ["layers.*", "norm.*", "head.*"]
    words = [word for name in frozen for word in ("--param-group", name, "frozen")]
    more = ["--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"]
    result = launcher.run(2, [*FLAGS, *more, *words, "--log-digests", "1"])
    assert result.codes == [0, 0], result.said(0)
    head, *_ = lines_of(result.folder)
    assert head["names"] == ["model.embed_tokens.weight"]


def test_without_the_flag_nothing_is_written_and_a_bad_place_is_named(launcher, tmp_path):
    result = launcher.run(1, FLAGS)
    assert result.codes == [0] and not (result.folder / "digests.jsonl").exists()
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(ValueError, match="--log-digests .*file.*cannot be written"):
        open_json(Path(place, "digests.jsonl"), "--log-digests")
