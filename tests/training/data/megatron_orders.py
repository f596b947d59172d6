#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold --data-order megatron against megatron-core's own dataset classes, over 24 settings.

    pip install megatron-core==0.16.1     into an environment that also has Weft's packages
    python -m tests.training.data.megatron_orders            compare; 1 where they differ
    python -m tests.training.data.megatron_orders --write    and write what the tests compare

A setting's digest is the SHA-256 of the tokens of all its samples in their order, of each split.
Every token of the files is another number, so equal tokens are equal sample numbers. With flags for
the ends of documents the digest covers positions, loss masks and attention masks too.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.sample_ledger import any_run
from training.data.batch import DocumentRules, make_batch
from training.data.build import build_datasets, samples_needed
from training.data.dataset import Dataset
from training.data.indexed import IndexedWriter, token_dtype
from training.settings.arguments import BatchConfig, DataConfig, ModelConfig, RunConfig
from training.settings.config import Config

WRITTEN = Path(__file__).with_suffix(".json")
VERSION = "0.16.1"
VOCABULARY = 70_000  # tokens are int32
FILES = {  # how many documents each file has, and how long the longest is
    "a": (60, 90),
    "b": (25, 200),
    "c": (200, 12),
    "d": (9, 40),
    "e": (80, 30),  # each ends with the end of a document
}
SPLITS = ("train", "valid", "test")


class Setting(NamedTuple):
    """Data, and how a run reads it. data: words of --data-path, or of a flag for each split."""

    data: tuple[str, ...] | dict[str, tuple[str, ...]]
    seed: int = 1234
    seq_length: int = 16
    iterations: int = 20
    batch: int = 4
    split: str = "90,8,2"
    eval_interval: int = 10
    eval_iters: int = 1
    ends: tuple[str, ...] = ()  # flags of DocumentRules


RESETS = ("reset_position_ids", "reset_attention_mask")
EACH = {"train": ("0.5", "a", "0.25", "b", "0.25", "c"), "valid": ("d",), "test": ("b", "d")}
SETTINGS = {
    "one epoch": Setting(("a",)),
    "another seed": Setting(("a",), seed=7),
    "another length": Setting(("a",), seq_length=33),
    "another split": Setting(("a",), split="8,1,1", eval_iters=2),
    "nothing held out": Setting(("a",), split="1,0,0"),
    "two epochs, all but the end": Setting(("a",), iterations=75, split="8,1,1"),
    "a short last epoch": Setting(("a",), iterations=50, split="8,1,1"),
    "five epochs": Setting(("a",), iterations=190, split="8,1,1", seed=3),
    "five epochs and a short one": Setting(("a",), iterations=205, split="8,1,1", seed=3),
    "empty documents": Setting(("c",), iterations=90, seq_length=24),
    "documents longer than a sample": Setting(("b",), seq_length=7, iterations=100),
    "a sample longer than documents": Setting(("c",), seq_length=64, iterations=40),
    "one file with a weight": Setting(("0.3", "a"), iterations=30),
    "two by weight": Setting(("3", "a", "1", "b"), iterations=60),
    "four by weight": Setting(
        ("0.1", "a", "0.2", "b", "0.3", "c", "0.4", "d"), iterations=100, split="6,3,1", seed=5
    ),
    "equal weights": Setting(("1", "b", "1", "c", "1", "a"), iterations=40, split="9,1,0"),
    "two without weights": Setting(("a", "b"), iterations=60, split="8,1,1"),
    "four without weights": Setting(("d", "c", "b", "a"), iterations=50, split="6,4,0"),
    "each split by itself": Setting(EACH, iterations=80, eval_iters=1, eval_interval=40),
    "many evaluations": Setting(("a",), split="5,4,1", eval_interval=1, eval_iters=3),
    "positions that begin anew": Setting(("e",), ends=RESETS[:1], iterations=30),
    "attention within documents": Setting(("e",), ends=RESETS[1:], seed=11, seq_length=24),
    "no loss at an end": Setting(("0.6", "e", "0.4", "b"), ends=("eod_mask_loss",), iterations=40),
    "all three": Setting(("e", "a"), ends=(*RESETS, "eod_mask_loss"), split="7,2,1"),
}


def write_files(folder: Path) -> None:
    """Write the files; some documents of c are empty."""
    draw, token = np.random.RandomState(0), 0
    for name, (documents, longest) in FILES.items():
        with IndexedWriter(str(folder / name), token_dtype(VOCABULARY)) as writer:
            for _ in range(documents):
                length = int(draw.randint(0 if name == "c" else 1, longest + 1))
                writer.add([*range(token, token + length), *[Tokenizer.eod] * (name == "e")])
                token += length


def digest(samples: list[np.ndarray]) -> str:
    """Return a SHA-256 of the tokens, in order."""
    found = hashlib.sha256()
    for sample in samples:
        found.update(np.asarray(sample, "<i8").tobytes())
    return f"{len(samples)} {found.hexdigest()}"


def config_of(setting: Setting, folder: Path) -> Config:
    """Return a run's config."""

    def at(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(folder / word) if word in FILES else word for word in words)

    own = setting.data if isinstance(setting.data, dict) else {}
    paths: dict[str, Any] = {f"{name}_data_path": at(words) for name, words in own.items()}
    if not isinstance(setting.data, dict):
        paths = {"data_path": at(setting.data), "split": setting.split}
    s = setting
    return Config(
        model=ModelConfig(1, 8, 1, s.seq_length),
        batch=BatchConfig(1, s.batch, train_iters=s.iterations),
        data=DataConfig(
            data_order="megatron", num_workers=0, **paths, **dict.fromkeys(s.ends, True)
        ),
        run=RunConfig(seed=s.seed, eval_interval=s.eval_interval, eval_iters=s.eval_iters),
    )


class Tokenizer:
    """What a dataset asks of a tokenizer."""

    vocab_size, eod = VOCABULARY, VOCABULARY - 1


def ours(setting: Setting, folder: Path) -> dict[str, str]:
    """Return {split: digest} of Weft's order."""
    found: dict[str, Dataset | None] = build_datasets(  # one is tested on what it trains on
        config_of(setting, folder), Tokenizer(), lambda line: None, begun=any_run
    )  # type: ignore[arg-type]
    rules = DocumentRules(Tokenizer.eod, **dict.fromkeys(setting.ends, True))

    def read(data: Any, i: int) -> np.ndarray:
        sample = data.sample(i)
        if not setting.ends:
            return sample
        batch, places = make_batch(sample[None], rules, i), np.arange(len(sample) - 1)
        lengths = batch.packed_seq_params and batch.packed_seq_params.lengths
        document = np.repeat(np.arange(len(lengths)), lengths) if lengths else 0 * places
        may = (places[:, None] >= places) & (document[:, None] == document)
        positions = places if batch.position_ids is None else batch.position_ids.numpy()
        counts = places * 0 + 1 if batch.loss_mask is None else batch.loss_mask.numpy()
        return joined(sample, positions, counts, may)

    return {
        split: digest([read(data, i) for i in range(data.samples)])  # type: ignore[attr-defined]
        for split, data in found.items()
        if data is not None
    }


def joined(*arrays: np.ndarray) -> np.ndarray:
    """Return arrays one after another, as numbers."""
    return np.concatenate([np.asarray(array).astype(np.int64).ravel() for array in arrays])


def theirs(setting: Setting, folder: Path) -> dict[str, str]:
    """Return {split: digest} of megatron-core's."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    config = config_of(setting, folder)
    d = config.data
    each = (d.train_data_path, d.valid_data_path, d.test_data_path)
    blends: dict[str, Any]
    if d.data_path:
        blends = {"blend": get_blend_from_list(list(d.data_path)), "split": d.split}
    else:
        blends = {"blend_per_split": [get_blend_from_list(list(words)) for words in each]}

    class Text:
        vocab_size, eod, pad, eos = VOCABULARY, VOCABULARY - 1, -1, VOCABULARY - 1
        unique_identifiers: dict[str, str] = {}

    made = GPTDatasetConfig(
        random_seed=setting.seed, sequence_length=setting.seq_length, tokenizer=Text(),
        path_to_cache=None, **blends,
        **{name: name in setting.ends for name in (*RESETS, "eod_mask_loss")},
    )  # fmt: skip
    sizes = [samples for samples, _ in samples_needed(config).values()]
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, made).build()
    found = {}
    for split, data in zip(SPLITS, built, strict=True):
        if data is not None and len(data):
            rows = [data[i] for i in range(len(data))]
            samples = [np.append(row["tokens"].numpy(), row["labels"].numpy()[-1]) for row in rows]
            if setting.ends:
                samples = [
                    joined(sample, row["position_ids"], row["loss_mask"], ~row["attention_mask"][0])
                    for sample, row in zip(samples, rows, strict=True)
                ]
            found[split] = digest(samples)
    return found


def main() -> int:
    """Compare; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    try:
        import megatron.core
    except ImportError:
        print(f"megatron-core is not installed: pip install megatron-core=={VERSION}")
        return 2
    digests, equal = {}, 0
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as at:
            write_files(Path(at))
            wanted, got = theirs(setting, Path(at)), ours(setting, Path(at))
        digests[name] = wanted
        equal += wanted == got
        counts = ", ".join(f"{split} {value.split()[0]}" for split, value in wanted.items())
        print(f"{name:34} {'equal' if wanted == got else 'DIFFERENT'}: samples of {counts}")
        if wanted != got:
            print(f"    Megatron-LM {wanted}\n    Weft        {got}")
    version = megatron.core.__version__
    print(f"{equal} of {len(SETTINGS)} settings equal megatron-core {version}")
    if args.write:
        WRITTEN.write_text(json.dumps({"megatron-core": version, "digests": digests}, indent=1))
    return int(equal < len(SETTINGS))


if __name__ == "__main__":
    sys.exit(main())
