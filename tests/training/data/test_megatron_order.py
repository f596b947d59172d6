# SPDX-License-Identifier: Apache-2.0
"""--data-order megatron reads the samples that megatron-core 0.16.1 reads, in its order.

megatron_orders.json has the digests of megatron-core's own dataset classes over 24 settings;
`python -m tests.training.data.megatron_orders` makes them again where it is installed.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from mpu import native
from tests.training.data.megatron_orders import (
    SETTINGS,
    WRITTEN,
    Setting,
    Tokenizer,
    config_of,
    ours,
    write_files,
)
from tests.training.small_llama import SMALL, read
from training.data.build import build_datasets, build_loaders, samples_needed
from training.data.dataset import DataError

DIGESTS = json.loads(WRITTEN.read_text())["digests"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    write_files(folder)
    return folder


def test_there_are_settings_and_each_order_differs():
    assert list(DIGESTS) == list(SETTINGS) and len(DIGESTS) == 24
    train = [digests["train"] for digests in DIGESTS.values()]
    assert len(set(train)) >= 22  # the length of a run within one epoch changes nothing


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_are_those_of_megatron_core(name, files):
    assert ours(SETTINGS[name], files) == DIGESTS[name]


def test_without_the_compiled_library_they_are_the_same(files, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "load", lambda: None)
    write_files(tmp_path)  # with no index cache yet
    for name in ("four by weight", "four without weights", "each split by itself"):
        assert ours(SETTINGS[name], tmp_path) == DIGESTS[name]


def datasets(setting, folder):
    return build_datasets(config_of(setting, folder), Tokenizer(), lambda line: None)


def test_a_longer_run_of_other_epochs_is_other_data(files):
    short, same, longer = (
        datasets(Setting(("a",), iterations=n), files)["train"] for n in (20, 30, 90)
    )
    assert short.corpus == same.corpus != longer.corpus
    assert short.digest != datasets(Setting(("a",), seed=1), files)["train"].digest
    weft = replace(config_of(Setting(("a",)), files).data, data_order="weft")
    config = replace(config_of(Setting(("a",)), files), data=weft)
    assert build_datasets(config, Tokenizer())["train"].corpus != short.corpus


def test_what_a_user_is_told(files):
    few = Setting(("a", "b"), iterations=500)
    with pytest.raises(ValueError, match="--data-path without weights holds .* give weights, with"):
        datasets(few, files)
    with pytest.raises(ValueError, match="takes no weight of 0"):
        datasets(Setting(("0", "a", "1", "b")), files)
    for setting in (Setting(("a",)), Setting(("1", "a", "1", "b"))):
        data = datasets(setting, files)["train"]
        with pytest.raises(DataError, match="for the length of this run, and sample"):
            data.sample(10_000)


def test_batches_follow_the_order_at_any_number_of_ranks(files):
    """Sample i of Megatron is row i mod b of micro-batch i // b, as MegatronPretrainingSampler."""
    config = config_of(Setting(("3", "a", "1", "b"), iterations=10), files)
    data = build_datasets(config, Tokenizer())["train"]
    for ranks in (1, 2, 4):
        rows = {}
        for rank in range(ranks):
            loader = build_loaders(config, Tokenizer(), rank, ranks, lambda line: None).train
            for batch in loader.next_global_batch(8, 4):
                rows[batch.first_sample] = batch.tokens[0].tolist()
        assert rows == {i: data.sample(i)[:-1].tolist() for i in range(8, 12)}


def test_a_run_reads_it_and_a_resume_refuses_the_other_order(tmp_path, capsys):
    write_files(tmp_path)
    words = f"""
        --data-path 0.3 {tmp_path}/a 0.7 {tmp_path}/b --split 8,1,1 --tokenizer-type NullTokenizer
        --vocab-size 70000 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
        --ffn-hidden-size 32
        --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 3 --device cpu
        --eval-interval 2 --eval-iters 1 --save {tmp_path}/run --load {tmp_path}/run
    """.split()
    assert pretrain_llama.main([*words, "--data-order", "megatron", "--exit-interval", "2"]) == 0
    assert pretrain_llama.main([*words, "--data-order", "weft"]) == 2
    assert "another blend of it (--data-path, --split, --data-order)" in capsys.readouterr().err
    assert pretrain_llama.main([*words, "--data-order", "megatron"]) == 0
    order = np.load(next(iter(Path(tmp_path / "cache").glob("*.npy"))), mmap_mode="r")
    assert order.dtype == np.int32


@pytest.mark.parametrize(
    ("length", "made", "read_"),
    [
        ("--train-iters 10", 30, 30), ("--train-samples 51", 54, 54),
        ("--train-iters 10 --global-batch-size 4", 40, 40),
        ("--train-samples 50 --global-batch-size 4", 50, 48),  # as Megatron, of which the order is
    ],
)  # fmt: skip
def test_the_order_is_made_for_all_steps_of_a_schedule_of_batch_sizes(length, made, read_):
    """20 samples in batches of 2, then batches of 4."""
    schedule = "" if "global" in length else '--step-batch-size-schedule "0:2 320:4"'
    base = SMALL.replace("--train-iters 10", "") + " --micro-batch-size 1"
    config = read(f"{length} {schedule}", base=base)
    assert samples_needed(config)["train"] == (made, read_)
