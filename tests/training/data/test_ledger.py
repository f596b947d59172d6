# SPDX-License-Identifier: Apache-2.0
"""The ledger of a run: equal for every layout and after a resume, different for other data."""

import itertools

import pytest

from tests.sample_ledger import main
from training.data.indexed import IndexedWriter, token_dtype


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write three files of different sizes; the first two are read more than once."""
    folder = tmp_path_factory.mktemp("data")
    prefixes = []
    for name, documents in (("a", 200), ("b", 60), ("c", 3)):
        prefixes.append(str(folder / name))
        with IndexedWriter(prefixes[-1], token_dtype(1000)) as writer:
            for i in range(documents):
                writer.add(range(i % 37 + 1))
    return prefixes


MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16"
RUN = "--seq-length 16 --lr 1e-3 --train-iters 1000 --tokenizer-type NullTokenizer --vocab-size 999"
SCHEDULE = "0:8 512:16 1K:24"  # tokens: from sample 0, 32 and 62 on


def flags(data, *more):
    a, b, c = data
    blend = ["--data-path", "0.7", a, "0.3", b, "1e-9", c, "0", a, "--split", "1"]
    return [*MODEL.split(), *RUN.split(), *blend, "--step-batch-size-schedule", SCHEDULE, *more]


def read(capsys, monkeypatch, given, world=1, first=1, steps=40, rows=()):
    """Return what the tool prints for a world size."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    status = main(["--first-step", str(first), "--steps", str(steps), *rows, "--", *given])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out.splitlines()


@pytest.mark.prove
def test_layout_and_resume_change_nothing(capsys, monkeypatch, data):
    """Over 40 steps: several epochs of the second file, three batch sizes."""
    serial = read(capsys, monkeypatch, flags(data))
    assert len(set(serial)) == 40
    assert serial[0].startswith("step 1  consumed 0  batch 8  ")
    assert serial[5].startswith("step 6  consumed 48  batch 16  ")
    for world, micro, workers in itertools.product((1, 2, 4, 8), (1, 2, 4), (0, 1, 2)):
        if 8 % (world * micro) == 0:
            layout = flags(data, "--micro-batch-size", str(micro), "--num-workers", str(workers))
            assert read(capsys, monkeypatch, layout, world) == serial
    resumed = flags(data, "--micro-batch-size", "2", "--num-workers", "1")
    for first in (2, 17, 40):
        found = read(capsys, monkeypatch, resumed, 4, first, 41 - first)
        assert found == serial[first - 1 :]


def test_tensor_parallel_ranks_share_their_rows(capsys, monkeypatch, data):
    serial = read(capsys, monkeypatch, flags(data), steps=3)
    tp = flags(data, "--tensor-model-parallel-size", "2")
    assert read(capsys, monkeypatch, tp, 4, steps=3) == serial


@pytest.mark.parametrize(
    "change",
    [
        ["--seed", "7"],
        ["--seq-length", "8"],
        ["--split", "9,1"],
        ["--step-batch-size-schedule", "0:16"],
    ],
)
def test_what_matters_changes_it(capsys, monkeypatch, data, change):
    serial = read(capsys, monkeypatch, flags(data), steps=3)
    assert not set(serial) & set(read(capsys, monkeypatch, flags(data, *change), steps=3))
