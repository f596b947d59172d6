# SPDX-License-Identifier: Apache-2.0
"""Build the three loaders of a run from its flags: training, validation and test."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mpu import native
from training.data.batch import DocumentRules
from training.data.blend import Blend, parse_blend
from training.data.bytes_per_token import bytes_per_token
from training.data.cache import IndexCache
from training.data.dataset import Dataset
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedTokens
from training.data.loader import Loader
from training.data.local_copy import local_copy
from training.data.mock import MockDataset
from training.data.split import DEFAULT_SPLIT, SPLITS, parse_split, split_documents

if TYPE_CHECKING:
    from training.config import Config
    from training.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run; valid and test are None where their split is empty.

    `digest` identifies the sample order of all three: it depends on data, blend, split, sequence
    length and seed, and on nothing else. The first time it reads every token of large files.
    """

    train: Loader
    valid: Loader | None
    test: Loader | None
    tokenizer: "Tokenizer | None" = None  # of all three

    @property
    def digest(self) -> str:
        """Return a SHA-256 of the datasets' digests."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        digests = {split: part and part.dataset.digest for split, part in parts.items()}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def build_loaders(
    config: "Config",
    tokenizer: "Tokenizer",
    dp_rank: int,
    dp_size: int,
    report: Callable[[str], None] = print,
    context: tuple[int, int] = (0, 1),
) -> Loaders:
    """Open the data that the flags name and return the loader of each split; context: see Loader.

    Raises ValueError, naming flag or file, for data that cannot be trained on.
    """
    data = config.data
    rules = DocumentRules(
        tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )
    datasets = build_datasets(config, tokenizer, report)
    samples = config.run.eval_iters * config.batch.global_batch_size  # of an evaluation

    def load(dataset: Dataset | None) -> Loader | None:
        if dataset is None:
            return None
        return Loader(
            dataset,
            config.batch.micro_batch_size,
            dp_rank,
            dp_size,
            vocab_size=tokenizer.vocab_size,
            rules=rules,
            workers=data.num_workers,
            context=context,
            timeout=data.data_timeout,
            report=report,
            bytes_per_token=partial(bytes_per_token, dataset, tokenizer, rules, samples),
        )

    train = load(datasets["train"])
    if train is None:
        raise ValueError("the train split holds no document: check --split and the data paths")
    valid = load(datasets["valid"])
    if valid is None and config.run.eval_interval and config.run.eval_iters > 0:
        why = "--valid-data-path holds no token"
        if data.data_path:
            why = (
                f"--split {data.split or DEFAULT_SPLIT} gives whole documents and none to "
                "validation: give its second number more, or --valid-data-path "
                "(tools/build_corpus.py cuts a text and holds a part of it out)"
            )
        raise ValueError(
            f"--eval-interval {config.run.eval_interval} has nothing to evaluate on: {why}"
        )
    return Loaders(train, valid, load(datasets["test"]), tokenizer)


def build_datasets(
    config: "Config", tokenizer: "Tokenizer", report: Callable[[str], None] = print
) -> dict[str, Dataset | None]:
    """Return {split: dataset}, None for an empty split."""
    data, seq_length, seed = config.data, config.model.seq_length, config.run.seed
    if data.mock_data:
        return {
            split: MockDataset(split, seq_length, seed, tokenizer.vocab_size, tokenizer.eod)
            for split in SPLITS
        }
    own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if bool(data.data_path) == any(own_paths):
        raise ValueError(
            "give the data either by --data-path (cut by --split) or by --train-data-path, "
            "--valid-data-path and --test-data-path, or ask for --mock-data"
        )
    opener = _Opener(
        data.data_cache_path, seq_length, seed, tokenizer.vocab_size, report, data.data_local_copy
    )
    if data.data_path:
        shares = parse_split(data.split or DEFAULT_SPLIT)
        return {
            split: opener.open(data.data_path, "--data-path", split, shares) for split in SPLITS
        }
    return {
        split: opener.open(paths, f"--{split}-data-path", split, None) if paths else None
        for split, paths in zip(SPLITS, own_paths, strict=True)
    }


class _Opener:
    """Open each file once and each cache directory once, for all splits."""

    def __init__(
        self,
        cache_path: str | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        report: Callable[[str], None],
        local: str | None = None,
    ) -> None:
        self._cache_path, self._local = cache_path, local
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._report = report
        self._files: dict[str, IndexedTokens] = {}
        self._caches: dict[tuple[str, int], IndexCache] = {}

    def open(
        self, paths: Sequence[str], flag: str, split: str, shares: tuple[float, float, float] | None
    ) -> Dataset | None:
        """Return the dataset of a split, None if empty; `shares` cut each file, None takes all."""
        prefixes, weights = parse_blend(paths, flag)
        found: list[GPTDataset] = []
        kept: list[float] = []
        for i, prefix in enumerate(prefixes):
            if prefix not in self._files:
                at = local_copy(prefix, self._local, self._report) if self._local else prefix
                self._files[prefix] = IndexedTokens(at, self._cache(at))
                self._files[prefix].check_vocabulary(self._vocab_size)
            file = self._files[prefix]
            cut = split_documents(shares, len(file))[split] if shares else range(len(file))
            if file.lengths[cut.start : cut.stop].any() and (weights is None or weights[i] > 0):
                dataset = self._dataset(file, split, cut)
                found.append(dataset)
                kept.append(float(dataset.tokens) if weights is None else weights[i])
            elif weights and weights[i] > 0 and split == "train":
                raise ValueError(
                    f"{flag}: {prefix} has weight {weights[i]:g} but no {split} tokens"
                )
        if len(found) > 1:
            return Blend(found, kept)
        return found[0] if found else None

    def _dataset(self, file: IndexedTokens, split: str, documents: range) -> GPTDataset:
        cache, library = self._cache(file.prefix), native.load()
        return GPTDataset(
            file, split, documents, self._seq_length, self._seed, cache=cache, library=library
        )

    def _cache(self, prefix: str) -> IndexCache:
        """Return the cache for a file, which believes what the file's owner wrote there."""
        directory = self._cache_path or os.path.join(os.path.dirname(prefix), "cache")
        owner = os.stat(prefix + ".bin").st_uid if os.path.exists(prefix + ".bin") else 0
        if (directory, owner) not in self._caches:
            self._caches[directory, owner] = IndexCache(directory, self._report, owner=owner)
        return self._caches[directory, owner]
