# SPDX-License-Identifier: Apache-2.0
"""The tokens that each step trains on are the same however the run is laid out and interrupted.

The tokens are those that reach `train_step`; tests/training/data/test_ledger.py tests the formula.
The runs have other data-parallel sizes, micro-batches and workers, kill -9 and resumes into other
layouts, several epochs of small files, blends and a batch that grows. The oracle reads the data set
one sample after another, and checks each against the document that it should begin in.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import launcher as launching
from tests.launcher import Launcher, Result
from tests.sample_ledger import Entry, ledger
from training.data.build import build_datasets, build_loaders
from training.data.indexed import IndexedWriter, token_dtype
from training.data.tokenizer import build_tokenizer
from training.flags.parse import parse
from training.settings.batch_size import global_batch_size, samples_after

# of the failure channel, shortened; not its silence: on a busy machine a rank may be quiet for long
PATIENCE = {"grace": 0.5, "unwind": 0.5}
LENGTH, STEPS, EVERY = 16, 14, 2  # tokens a sample, steps of a run, steps between its saves
FLAGS = f"""
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --device cpu
    --seq-length {LENGTH} --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 999 --split 1
    --train-iters {STEPS} --log-interval 1
"""
SCHEDULE = "0:8 512:16 1K:24"  # tokens: from sample 0, 32 and 62 on
SETS = {"a": ("0.7", 30), "b": ("0.3", 9), "c": ("1e-9", 3), "d": ("0", 20)}  # weight, documents


class Way(NamedTuple):
    """How the samples of a step are shared; others: ranks along other axes, with their flags."""

    dp: int
    micro: int
    workers: int
    others: int = 1
    more: str = ""

    def flags(self) -> list[str]:
        words = f"--micro-batch-size {self.micro} --num-workers {self.workers} {self.more}"
        return words.split()


WAYS = [Way(dp, b, w) for dp in (1, 2, 4, 8) for b in (1, 2, 4) for w in (0, 1, 2) if dp * b <= 8]
MODEL_PARALLEL = [
    Way(2, 2, 1, 2, "--tensor-model-parallel-size 2 --zero-stage 3"),
    Way(2, 1, 2, 2, "--pipeline-model-parallel-size 2"),
]


def document(name: str, number: int) -> list[int]:
    """Return the tokens of a document: they tell which it is, and the place in it."""
    start = 100 * list(SETS).index(name) + 17 * number
    return [(start + 7 * i * i + i) % 990 for i in range(number * 5 % 37 + 1)]


class Oracle:
    """The data, and the rows of every step of the run: [sample, token, ..., token]."""

    def __init__(self, folder: Path) -> None:
        words = []
        for name, (weight, count) in SETS.items():
            words += [weight, str(folder / name)]
            with IndexedWriter(words[-1], token_dtype(999)) as out:
                for i in range(count):
                    out.add(document(name, i))
        self.flags = [*FLAGS.split(), "--step-batch-size-schedule", SCHEDULE, "--data-path", *words]
        self.config = parse(self.flags, 1)
        data = self.config.data
        self.tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, 999)
        quiet = dict(report=lambda line: None)
        self.dataset = build_datasets(self.config, self.tokenizer, **quiet)["train"]
        self.entries: list[Entry] = []

    def rows(self, step: int) -> list[list[int]]:
        """Return the rows of a step, counted from 1, in the order of the samples."""
        have = len(self.entries)
        if step > have:
            more = range(have + 1, step + 40)
            self.entries += ledger(self.config, self.tokenizer, more)
        found = []
        for sample, dataset, number, offset in self.entries[step - 1].rows:
            tokens = self.dataset.sample(sample).tolist()
            begin = document("abc"[dataset], number)[offset:]
            assert 0 < len(begin) and tokens[: len(begin)] == begin[: len(tokens)]
            found.append([sample, *tokens])
        return found


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("data"))


def test_the_oracle_sees_epochs_sets_and_sizes(oracle):
    rows = [row for step in range(1, STEPS + 1) for row in oracle.rows(step)]
    assert [row[0] for row in rows] == list(range(samples_after(oracle.config, STEPS)))
    used = [row[1:3] for entry in oracle.entries[:STEPS] for row in entry.rows]
    assert {dataset for dataset, _ in used} == {0, 1}  # 1e-9 comes later, 0 never
    for dataset, (_, documents) in zip((0, 1), SETS.values(), strict=False):
        most = max(used.count((dataset, number)) for number in range(documents))
        assert most > 3, "a run crosses the ends of epochs"
    assert len({tuple(row[1:]) for row in rows}) > len(rows) / 2
    assert {len(oracle.rows(step)) for step in range(1, STEPS + 1)} == {8, 16, 24}


def check_share(rows: list[list[int]], wanted: list[list[int]], way: Way, rank: int) -> None:
    """Hold a data-parallel rank to its rows: micro-batch k has (k dp + rank) micro and on."""
    starts = range(rank * way.micro, len(wanted), way.dp * way.micro)
    assert rows == [wanted[start + i] for start in starts for i in range(way.micro)]


def check_chain(oracle: Oracle, seed: int) -> int:
    """Read 60 steps in several layouts, each from where it likes; return the steps compared."""
    rng, step, compared = random.Random(seed), 1, 0
    while step <= 60:
        way = rng.choice(WAYS)
        config = parse([*oracle.flags, *way.flags()], way.dp)
        loaders = [
            build_loaders(config, oracle.tokenizer, rank, way.dp, lambda line: None).train
            for rank in range(way.dp)
        ]
        for now in range(step, min(step + rng.randrange(1, 12), 61)):
            consumed = samples_after(config, now - 1)
            size = global_batch_size(config, consumed)
            for rank, loader in enumerate(loaders):
                rows = [
                    [batch.first_sample + i, *tokens, labels[-1]]
                    for batch in loader.next_global_batch(consumed, size)
                    for i, (tokens, labels) in enumerate(
                        zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
                    )
                ]
                check_share(rows, oracle.rows(now), way, rank)
            compared += 1
        for loader in loaders:
            loader.close()
        step = now + 1 - rng.randrange(3) * (now > 3)  # what came after the last save is lost
    return compared


@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 30), marks=pytest.mark.prove)], ids=["few", "many"]
)
def test_loaders_of_any_layout_hand_out_the_same_tokens(oracle, seeds):
    for seed in seeds:
        assert check_chain(oracle, seed) >= 60


@pytest.fixture(scope="module")
def recorder(tmp_path_factory, free_port) -> Iterator[Launcher]:
    """A launcher whose ranks write down what they train on."""
    script = launching.SCRIPT
    launching.SCRIPT = script.with_name("ledger_ranks.py")
    made = Launcher(tmp_path_factory.mktemp("ledgers"), free_port)
    launching.SCRIPT = script
    yield made
    made.close()


def check_ledger(oracle: Oracle, result: Result, way: Way, begin: int) -> set[int]:
    """Hold what a run wrote down to the oracle; return the steps that every rank began."""
    steps: list[set[int]] = []
    for rank in range(way.dp * way.others):
        path = result.folder / f"ledger.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        steps.append(set())
        for i, line in enumerate(map(json.loads, lines)):
            assert line["iteration"] == begin + i
            assert line["consumed"] == samples_after(oracle.config, begin + i)
            dp_rank = rank // (1 if "pipeline" in way.more else way.others) % way.dp
            check_share(line["rows"], oracle.rows(begin + i + 1), way, dp_rank)
            steps[-1].add(begin + i + 1)
    return set.intersection(*steps)


def kill_repeatedly(
    oracle: Oracle, recorder: Launcher, ways: list[Way], kills: int, seed: int
) -> None:
    """Run to the end over kills at random places, each time in another layout."""
    rng, folder, way, killed = random.Random(seed), None, None, 0
    done: set[int] = set()
    for attempt in range(2 * kills + 2):
        way = rng.choice([other for other in ways if other != way])
        ranks = way.dp * way.others
        fault: dict[str, Any] | None = None
        if attempt < kills:
            point = rng.choice(["data", "forward", "backward", "gradient sums", "update", "saving"])
            calls = {"forward": 20, "backward": 80, "saving": 2}.get(point, 5)
            victim = rng.choice([-1, rng.randrange(ranks)])
            fault = dict(point=point, rank=victim, call=rng.randint(1, calls), how="kill")
        argv = [*oracle.flags, *way.flags(), "--save-interval", str(EVERY)]
        argv += ["--save", "{dir}/saved", "--load", "{dir}/saved"]
        names = [] if folder is None else Result([], [], False, folder).saved()
        complete = [name for name in names if "." not in name]
        begin = int(complete[-1].removeprefix("step_")) if complete else 0
        result = recorder.run(ranks, argv, folder, fault=fault, monitor=PATIENCE)
        folder = result.folder
        done |= check_ledger(oracle, result, way, begin)
        killed += -9 in result.codes
        if -9 not in result.codes:
            assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
            break
    assert done == set(range(1, STEPS + 1)) and killed > 1, (done, killed)
    last = json.loads((folder / "saved" / f"step_{STEPS:08d}" / "state.json").read_text())
    assert last["consumed_samples"] == samples_after(oracle.config, STEPS)


@pytest.mark.prove
def test_runs_that_are_killed_and_resumed_elsewhere_train_on_the_same_tokens(oracle, recorder):
    kill_repeatedly(oracle, recorder, [way for way in WAYS if way.dp < 8], kills=3, seed=1)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(2, 8))
def test_repeated_kills(oracle, recorder, seed):
    kill_repeatedly(oracle, recorder, WAYS + 4 * MODEL_PARALLEL, kills=8, seed=seed)
