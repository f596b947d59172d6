# SPDX-License-Identifier: Apache-2.0
"""Build the three loaders of a run from its flags: training, validation and test."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mpu import native
from training.data.batch import DocumentRules
from training.data.blend import Blend, parse_blend
from training.data.bytes_per_token import TextBytes
from training.data.cache import IndexCache
from training.data.dataset import Dataset
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedTokens
from training.data.loader import Loader
from training.data.loss_mask import LossMask, find_loss_mask
from training.data.made_with import MadeWith
from training.data.megatron_order import (
    MegatronBlend,
    MegatronDataset,
    normalized,
    sizes_of_blend,
)
from training.data.mock import MockDataset
from training.data.one_pass import OnePass
from training.data.same_data import Part, twice
from training.data.split import DEFAULT_SPLIT, SPLITS, parse_split, split_documents
from training.data.stage_datasets import Staged, StageData
from training.faults.activity import Activity
from training.settings.batch_size import total_iterations, total_samples
from training.settings.stages import stage_of

if TYPE_CHECKING:
    from training.data.tokenizer import Tokenizer
    from training.settings.config import Config


# Called for data that is read twice: (split, training data) -> whether the run resumes one that
# began with this data, and so continues in its order.
Begun = Callable[[str, Dataset], bool]


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run; test is None where its split is empty.

    valid: {name: loader} of the validation sets, empty if the split is; the name is "" unless
    --multiple-validation-sets was given.

    `digest` identifies the sample order of all three: it depends on data, blend, split, sequence
    length and seed, and on nothing else. Its first computation reads every token of large files.
    """

    train: Loader
    valid: Mapping[str, Loader]
    test: Loader | None
    tokenizer: "Tokenizer | None" = None  # of all three

    def evaluated_on(self, samples: int) -> dict[str, str]:
        """Return {set: SHA-256 of the data of an evaluation}.

        That is `samples` samples, or all of a set that is not endless.
        """
        facts = {
            name: [loader.dataset.digest, loader.dataset.length or samples]
            for name, loader in self.valid.items()
        }
        return {name: _sha256(each) for name, each in facts.items()}

    @property
    def digest(self) -> str:
        """Return a SHA-256 of the datasets' digests."""
        valid = {name: loader.dataset.digest for name, loader in self.valid.items()}
        held_out = valid[""] if valid.keys() == {""} else valid or None
        test = self.test and self.test.dataset.digest
        return _sha256({"train": self.train.dataset.digest, "valid": held_out, "test": test})


def _sha256(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def build_loaders(
    config: "Config",
    tokenizer: "Tokenizer",
    dp_rank: int,
    dp_size: int,
    report: Callable[[str], None] = print,
    context: tuple[int, int] = (0, 1),
    *,
    activity: Activity | None = None,
    begun: Begun | None = None,
) -> Loaders:
    """Open the data that the flags name and return the loader of each split; context: see Loader.

    activity: reports slow operations; None: a new one that calls `report`. begun: see
    build_datasets(). Raises ValueError, naming flag or file, for data that cannot be trained on.
    """
    data = config.data
    rules = DocumentRules(
        tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )
    datasets = build_datasets(config, tokenizer, report, activity, begun=begun)
    held_out_text = TextBytes(tokenizer, report)

    def load(dataset: Dataset | None, text: TextBytes | None = None) -> Loader | None:
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
            timeout=0.0 if data.mock_data else data.data_timeout,  # no read that could hang
            report=report,
            text=text,
        )

    train = load(datasets["train"])
    if train is None:
        raise ValueError("the train split has no documents: check --split and the data paths")
    held_out = {
        name.partition("-")[2]: load(dataset, held_out_text)
        for name, dataset in datasets.items()
        if name.startswith("valid")
    }
    valid = {name: loader for name, loader in held_out.items() if loader is not None}
    for name in held_out.keys() - valid.keys() if data.multiple_validation_sets else ():
        raise ValueError(f"--multiple-validation-sets: the set {name} has no token in the loss")
    run = config.run
    asked = {
        "--skip-train": run.skip_train,
        "--eval-at-start": run.eval_at_start,
        f"--eval-interval {run.eval_interval}": run.eval_interval,
    }
    evaluates = run.eval_iters > 0 or data.full_validation
    if not valid and evaluates and any(asked.values()):
        why = "--valid-data-path has no token in the loss"
        if data.data_path:
            why = (
                f"--split {data.split or DEFAULT_SPLIT} assigns whole documents, and none to "
                "validation: raise its second number, or use --valid-data-path "
                "(tools/build_corpus.py cuts a text and holds out a part of it)"
            )
        by = next(flag for flag, given in asked.items() if given)
        raise ValueError(f"{by} has nothing to evaluate on: {why}")
    return Loaders(train, valid, load(datasets["test"], held_out_text), tokenizer)


def build_datasets(
    config: "Config",
    tokenizer: "Tokenizer",
    report: Callable[[str], None] = print,
    activity: Activity | None = None,
    *,
    begun: Begun | None = None,
) -> dict[str, Dataset | None]:
    """Return {split: dataset}, None for a split without tokens that count in the loss.

    With --multiple-validation-sets each set has its own key, "valid-" and its name. begun: see
    `Begun`; None: the run is new. Raises ValueError, naming flag and file, for data that is
    missing, is read twice or has no token in the loss.
    """
    data, seq_length, seed = config.data, config.model.seq_length, config.run.seed
    if data.mock_data:
        return {
            split: MockDataset(split, seq_length, seed, tokenizer.vocab_size, tokenizer.eod)
            for split in SPLITS
        }
    own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if bool(data.data_path) == any((*own_paths, config.stages)):
        raise ValueError(
            "give the data either by --data-path (cut by --split) or by --train-data-path, "
            "--valid-data-path and --test-data-path, or ask for --mock-data"
        )
    named = f"--tokenizer-type {data.tokenizer_type}"
    named += f" --tokenizer-model {data.tokenizer_model}" if data.tokenizer_model else ""
    ends = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    made_with = MadeWith(tokenizer, named, ends=ends)
    opener = _Opener(
        data.data_cache_path, seq_length, seed, tokenizer.vocab_size, report,
        made_with=made_with, activity=activity,
    )  # fmt: skip
    needed = dict.fromkeys(SPLITS, (0, 0))
    if data.data_order == "megatron":
        needed = samples_needed(config)
    shares = parse_split(data.split or DEFAULT_SPLIT) if data.data_path else None
    found: dict[str, Dataset | None] = {}
    if config.stages:
        found["train"] = opener.open_stages(config)
        del needed["train"]
    for split, own in zip(SPLITS, own_paths, strict=True):
        if split in found:
            continue
        paths, flag = (data.data_path, "--data-path") if shares else (own, f"--{split}-data-path")
        full_validation = data.full_validation and split == "valid"
        sets = {split: paths}
        if data.multiple_validation_sets and split == "valid":
            sets = {f"valid-{name}": (path,) for name, path in validation_sets(own).items()}
        for name, each in sets.items():
            if each and (data.data_order == "weft" or full_validation):
                found[name] = opener.open(each, flag, name, shares, full_validation)
            else:
                ask = partial(opener.open_as_megatron, each, flag, name, shares)
                found[name] = ask(*needed[split]) if each else None
    for same in dict.fromkeys(twice(opener.parts, cut=shares is not None)):
        train = found["train"]
        if train is None or begun is None or not begun(same.split, train):
            raise ValueError(f"{same.what}: {same.instead}")
        report(f"{same.what}; the run was started with this data, and continues in its order")
    for empty in _without_loss(opener.parts, tokenizer.eod if data.eod_mask_loss else None, report):
        found[empty] = None
    made_with.tell(report)
    opener.tell_masks()
    return found


def _without_loss(
    parts: Sequence[Part], eod: int | None, report: Callable[[str], None]
) -> Iterator[str]:
    """Yield each evaluation split in which --eod-mask-loss, or a loss mask, leaves no token in the
    loss. eod: the token that --eod-mask-loss leaves out, None without the flag.

    Raises ValueError if this holds for the training data, or for one of its stages.
    """

    def why(part: Part) -> str:
        of = f"the {part.split} documents of " if part.split in SPLITS else ""
        if eod is not None and part.file.holds_only(eod, part.documents):
            return (
                f"{part.flag}: {of}{part.prefix} hold only the end-of-document token {eod}, which "
                "--eod-mask-loss leaves out of the loss"
            )
        if part.loss_mask and part.loss_mask.counts_none(part.documents):
            return (
                f"{part.flag}: {of}{part.prefix} have no token that {part.loss_mask.prefix} counts "
                "in the loss"
            )
        return ""

    blends: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        blends.setdefault((part.split, part.flag), []).append(part)
    for (split, _), blend in blends.items():
        lines = [line for line in map(why, blend) if line]
        if len(lines) == len(blend) and split == "train":
            raise ValueError(f"{lines[0]}, so no token would be trained on")
        for line in lines:
            report(line)
        if len(lines) == len(blend):
            yield split


def samples_needed(config: "Config") -> dict[str, tuple[int, int]]:
    """Return {split: (samples for which Megatron's order is made, samples that are read)}.

    Each of Megatron's evaluations continues where the last one ended; here each starts over. With
    --skip-train the order is made for as many as in a run of the same flags, so that the losses
    are equal.
    """
    batch, run = config.batch, config.run
    size, steps = batch.global_batch_size, total_iterations(config)
    train = total_samples(config)
    evaluation = max(0, run.eval_iters) * size
    times = 1
    if run.eval_interval:
        left_out = (run.start_eval_at_iter or 0) // run.eval_interval
        times = max(1, steps // run.eval_interval + 1 - left_out)
    return {
        "train": (max(batch.train_samples or 0, train), train),
        "valid": (times * evaluation, evaluation),
        "test": (evaluation, evaluation),
    }


def validation_sets(paths: Sequence[str]) -> dict[str, str]:
    """Return {name: prefix} of --multiple-validation-sets.

    A name is the last part of a prefix, without the endings of tools/preprocess_data.py; if two are
    equal, all sets are numbered instead, as in Megatron.
    """
    names = tuple(
        os.path.basename(path).removesuffix("_document").removesuffix("_text") for path in paths
    )
    if len(set(names)) < len(names):
        names = tuple(str(i) for i in range(len(paths)))
    return dict(zip(names, paths, strict=True))


class _Opener:
    """Open each file once and each cache directory once, for all splits."""

    def __init__(
        self,
        cache_path: str | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        report: Callable[[str], None],
        *,
        made_with: MadeWith,
        activity: Activity | None = None,
    ) -> None:
        self._cache_path = cache_path
        self._activity = activity or Activity(tell=report)
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._report, self._made_with = report, made_with
        self.parts: list[Part] = []  # the data sets that are read
        self._files: dict[str, IndexedTokens] = {}
        self._masks: dict[str, LossMask | None] = {}  # by the prefix of the file that is read
        self._caches: dict[tuple[str, int], IndexCache] = {}

    def open(
        self,
        paths: Sequence[str],
        flag: str,
        name: str,
        shares: tuple[float, float, float] | None,
        whole: bool = False,
    ) -> Dataset | None:
        """Return the dataset of a split, None if empty; `shares` cut each file, None takes all.

        name: the split, or "valid-" and the name of a set. whole: read each token once; else the
        samples are endless.
        """
        prefixes, weights = parse_blend(paths, flag)
        split = name.partition("-")[0]
        found: list[GPTDataset] = []
        weights_left: list[float] = []
        for i, prefix in enumerate(prefixes):
            file, cut = self._cut(prefix, split, shares)
            if file.lengths[cut.start : cut.stop].any() and (weights is None or weights[i] > 0):
                found.append(part := self._dataset(file, split, cut))
                self._add_part(name, flag, prefix, file, cut, weights is not None)
                weights_left.append(float(part.tokens) if weights is None else weights[i])
            elif weights and weights[i] > 0 and split == "train":
                raise ValueError(
                    f"{flag}: {prefix} has weight {weights[i]:g} but no {split} tokens"
                )
        if whole and found:
            once = OnePass(found)
            return once if once.length else None
        if len(found) > 1:
            return Blend(found, weights_left)
        return found[0] if found else None

    def open_stages(self, config: "Config") -> Staged:
        """Return the training data of --data-stages. All files of all stages are opened."""
        parts = []
        for stage in config.stages:
            flag = f"--data-stages {config.data.data_stages}: stage {stage.name!r}"
            prefixes, weights = parse_blend(stage.train_data_path, flag)
            found = []
            for prefix in prefixes:
                file, cut = self._cut(prefix, "train", None)
                if not file.lengths[cut.start : cut.stop].any():
                    raise ValueError(f"{flag}: {prefix} has no tokens")
                found.append(self._dataset(file, "train", cut, stage.length))
                self._add_part("train", flag, prefix, file, cut, weights is not None)
            shares = weights or [float(part.tokens) for part in found]
            keys = [os.path.realpath(prefix + ".bin") for prefix in prefixes]
            parts.append(StageData(found, shares, keys))
        current = stage_of(config)
        return Staged(config.stages, parts, current)

    def open_as_megatron(
        self,
        paths: Sequence[str],
        flag: str,
        name: str,
        shares: tuple[float, float, float] | None,
        samples: int,
        read: int,
    ) -> Dataset | None:
        """Return the dataset of a split in Megatron's order, None if empty or not to be read.

        samples: the number for which the order is made; `read` of them are read. As in Megatron,
        prefixes without weights give one epoch each, and a weight of 0 is refused.
        """
        prefixes, weights = parse_blend(paths, flag)
        split = name.partition("-")[0]
        cuts = [self._cut(prefix, split, shares) for prefix in prefixes]
        if not samples or not any(len(cut) for _, cut in cuts):
            return None
        for prefix, (file, cut) in zip(prefixes, cuts, strict=True):
            if file.lengths[cut.start : cut.stop].any():
                self._add_part(name, flag, prefix, file, cut, weights is not None)
        if len(prefixes) == 1 and (weights is None or shares is None):
            return self._in_order(*cuts[0], split, samples)
        if weights is None:
            parts = [self._in_order(file, cut, split, None) for file, cut in cuts]
            count, normal = min(samples, sum(part.samples for part in parts)), None
        else:
            if min(weights) <= 0:
                raise ValueError(f"{flag}: --data-order megatron takes no weight of 0")
            needed, made = sizes_of_blend(weights, samples)
            requests = zip(cuts, made, strict=True)
            parts = [self._in_order(file, cut, split, n) for (file, cut), n in requests]
            count, normal = sum(needed), normalized(weights)
        if count < read:
            raise ValueError(
                f"{flag} without weights holds {count} {split} samples under --data-order megatron "
                f"and the run reads {read}: give weights, with which data sets are repeated"
            )
        cache = self._cache(cuts[0][0].prefix)
        return MegatronBlend(parts, normal, count, cache, native.load())

    def _in_order(
        self, file: IndexedTokens, cut: range, split: str, samples: int | None
    ) -> MegatronDataset:
        return MegatronDataset(
            file,
            split,
            cut,
            self._seq_length,
            self._seed,
            samples=samples,
            cache=self._cache(file.prefix),
            library=native.load(),
            loss_mask=self._masks[file.prefix],
        )

    def _cut(
        self, prefix: str, split: str, shares: tuple[float, float, float] | None
    ) -> tuple[IndexedTokens, range]:
        """Return a file, opened once, and the documents of a split in it."""
        if prefix not in self._files:
            file = self._files[prefix] = IndexedTokens(prefix, self._cache(prefix))
            record = self._made_with.check(prefix, file.lengths)
            file.check_vocabulary(self._vocab_size)
            self._masks[prefix] = find_loss_mask(prefix, file, record, self._cache(prefix))
        file = self._files[prefix]
        return file, split_documents(shares, len(file))[split] if shares else range(len(file))

    def _dataset(
        self, file: IndexedTokens, split: str, documents: range, seq_length: int | None = None
    ) -> GPTDataset:
        return GPTDataset(
            *(file, split, documents, seq_length or self._seq_length, self._seed),
            cache=self._cache(file.prefix),
            library=native.load(),
            loss_mask=self._masks[file.prefix],
        )

    def _add_part(
        self, name: str, flag: str, prefix: str, file: IndexedTokens, cut: range, weighted: bool
    ) -> None:
        mask = self._masks[file.prefix]
        self.parts.append(
            Part(name, flag, prefix, file=file, documents=cut, weighted=weighted, loss_mask=mask)
        )

    def tell_masks(self) -> None:
        """Report in one line which files have a loss mask."""
        masked = [prefix for prefix, file in self._files.items() if self._masks[file.prefix]]
        if masked:
            more = len(masked) - 1
            self._report(
                f"data: the loss counts a part of the tokens of {masked[0]}"
                f"{f' (and {more} more)' if more else ''}, as its .loss_mask says"
            )

    def _cache(self, prefix: str) -> IndexCache:
        """Return the cache for a file, which trusts entries of the file's owner."""
        directory = self._cache_path or os.path.join(os.path.dirname(prefix), "cache")
        owner = os.stat(prefix + ".bin").st_uid if os.path.exists(prefix + ".bin") else 0
        if (directory, owner) not in self._caches:
            self._caches[directory, owner] = IndexCache(
                directory, self._report, owner=owner, activity=self._activity
            )
        return self._caches[directory, owner]
