# SPDX-License-Identifier: Apache-2.0
"""--profile: which ranks write a trace, when it stops, what a pipeline rank records of a step."""

import inspect
import json
import types
from contextlib import suppress

import pytest
import torch

import pretrain_llama
from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.pipeline.schedules import build
from tests.model.twin import config_of, micro_batches
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.stop import Agreement
from training.run.watch.profile import Profile

FLAGS = """--mock-data --vocab-size 100 --num-layers 4 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --lr 1e-3 --train-iters 3 --profile --profile-step-start 1 --profile-step-end 3
    --pipeline-model-parallel-size 2 --global-batch-size 4 --profile-ranks 1 --device cpu""".split()


def grid(rank: int) -> Grid:
    return Grid(4, 1, 1, 2, Launch(rank, 4))


SINK = types.SimpleNamespace(wait_for_weights=lambda: None)
AGREEMENT = types.SimpleNamespace(wait=lambda: None)


def test_only_the_ranks_asked_for_are_traced():
    config, engine = parse(FLAGS, 4), types.SimpleNamespace(spans=None)
    assert Profile(config, grid(0), engine, SINK, AGREEMENT)._trace is None
    profile = Profile(config, grid(1), engine, SINK, AGREEMENT)
    assert isinstance(profile._trace, torch.profiler.profile)


@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 2), (3, 5)])
def test_the_steps_asked_for_are_traced(first, end):
    words = [*FLAGS, "--profile-step-start", f"{first}", "--profile-step-end", f"{end}"]
    config = parse([*words, "--train-iters", "9"], 4)
    profile = Profile(config, grid(1), types.SimpleNamespace(spans=None), SINK, AGREEMENT)
    traced = [step for step in range(9) if "RECORD" in profile._trace.schedule(step).name]
    assert traced == [*range(first, end)]


def test_the_first_pipeline_writes_when_each_action_ran(tmp_path, monkeypatch):
    """The engine is asked for spans in the steps wanted; those of the last one are written."""
    monkeypatch.chdir(tmp_path)
    config, schedule = parse(FLAGS, 4), build("1f1b", 2, 2)
    for rank in range(4):
        engine = types.SimpleNamespace(spans=None, schedule=schedule)
        asked = []
        with Profile(config, grid(rank), engine, SINK, AGREEMENT) as profile:
            for step in range(4):
                asked.append(engine.spans is not None)
                if asked[-1]:
                    engine.spans = [("F", 0, 0, step + 0.0, step + 0.5)]
                profile.step()
        assert asked == ([False, True, True, False] if rank in (0, 2) else [False] * 4)
    written = sorted((tmp_path / "profile").glob("pipeline_rank*.json"))
    assert [path.name for path in written] == ["pipeline_rank0.json", "pipeline_rank1.json"]
    record = json.loads(written[1].read_text())
    assert (record["schedule"], record["pp_rank"], record["pp_size"]) == ("1f1b", 1, 2)
    assert [step["iteration"] for step in record["steps"]] == [2, 3]
    for step in record["steps"]:
        ((kind, chunk, micro_batch, begin, end),) = step["spans"]
        assert (kind, chunk, micro_batch) == ("F", 0, 0) and abs(end - begin - 0.5) < 1e-6


@pytest.mark.parametrize("steps, fails", [(4, False), (2, False), (2, True)])
def test_the_trace_stops_when_nothing_is_in_flight(tmp_path, monkeypatch, steps, fails):
    """Also where the run ends inside of it; after an error it does not stop."""
    monkeypatch.chdir(tmp_path)
    done, stop_trace = [], torch.profiler.profile.stop_trace

    def stopped(trace):
        done.append("stop")
        stop_trace(trace)

    monkeypatch.setattr(torch.profiler.profile, "stop_trace", stopped)
    sink = types.SimpleNamespace(wait_for_weights=lambda: done.append("weights"))
    agreement = types.SimpleNamespace(wait=lambda: done.append("flags"))
    engine = types.SimpleNamespace(spans=None)
    profile = Profile(parse(FLAGS, 4), grid(1), engine, sink, agreement)
    try:
        with profile:
            for step in range(steps):
                assert done == ([] if step < 3 else ["weights", "flags", "stop"])
                profile.step()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert done == []
        profile._trace.stop()
    else:
        assert done[:3] == ["weights", "flags", "stop"]


def in_flight(comm, cases):
    """Return, for each case, which verbs are in flight after a step, and after those two waits."""
    found, start, started = [], Axis.start, []

    def noted(axis, verb, *args, **kwargs):
        started.append((verb, start(axis, verb, *args, **kwargs)))
        return started[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axis, "start", noted)
        for case in cases:
            grid = comm.grid()
            run = pretrain_llama.build(config_of(case), grid, torch.device("cpu"), FailureMonitor())
            agreement = Agreement(grid.world)
            started.clear()
            for step in range(2):  # the second knows in which order weights are used
                batches = micro_batches(case, grid.dp.rank, step)
                _, _, skipped = pretrain_llama.train_step(run, batches, 1e-2)
                agreement.ask(False, False, skipped)
            found.append([])
            for wait in (lambda: None, run.sink.wait_for_weights, agreement.wait):
                wait()
                found[-1].append({verb for verb, handle in started if handle.work is not None})
    return found


def test_nothing_but_weights_and_flags_is_in_flight_between_two_steps(world):
    base = dict(tp=1, dp=2, sp=False, dtype="float32", recompute=None, tied=True, m=2, rows=8)
    cases = [base | dict(lr=1e-2, clip=0.1, zero=z, gather=True) for z in (1, 3)]
    flags, both = {"all_reduce"}, {"all_gather", "all_reduce"}
    for found in world(2).run(in_flight, cases):
        assert found == [[before, flags, set()] for before in (both, flags)]


def quiet(log):
    """Return an engine, a sink and an agreement that do nothing, and a note that is kept."""
    engine = types.SimpleNamespace(spans=None, schedule=build("1f1b", 2, 2))
    return engine, SINK, AGREEMENT, log.append


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ("--tensorboard-dir tb --save saved", "tb"),
        ("--save saved --log-json logs/a.jsonl", "saved/profile"),
        ("--log-json logs/a.jsonl", "logs/profile"),
        ("", "profile"),
    ],
)
def test_a_profile_lies_under_the_run_and_a_line_says_where(tmp_path, monkeypatch, more, where):
    monkeypatch.chdir(tmp_path)
    config, said = parse([*FLAGS, *more.split()], 4), []
    for rank in (0, 1):
        with Profile(config, grid(rank), *quiet(said)) as profile:
            for _ in range(4):
                profile.step()
    assert list((tmp_path / where).glob("rank1.*.json"))
    (line,) = said  # rank 0's, for all
    assert line.startswith(f"profile of steps 1 to 2 of this start: {where} (open torch's ")
    assert "of rank 1 with" in line


def test_a_profile_that_the_run_never_reached_is_not_claimed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    with Profile(parse(FLAGS, 4), grid(0), *quiet(said)) as profile:
        profile.step()
    assert said == []


@pytest.mark.parametrize("fails", [False, True])
def test_memory_history_is_written_at_the_end_and_after_a_failure(tmp_path, monkeypatch, fails):
    """By the calls that torch has: each is held against the signature of torch's own function."""
    monkeypatch.chdir(tmp_path)
    memory, calls, said = torch.cuda.memory, [], []
    monkeypatch.setattr("training.run.watch.profile.say", said.append)
    for name in ("_record_memory_history", "_dump_snapshot"):
        real = inspect.signature(getattr(memory, name))

        def called(*args, name=name, real=real, **kwargs):
            calls.append((name, dict(real.bind(*args, **kwargs).arguments)))

        monkeypatch.setattr(memory, name, called)
    asked = ["--record-memory-history", "--memory-snapshot-path", "deep/m.pickle", "--dry-run"]
    here = [word for word in FLAGS if word not in ("--profile", "--device", "cpu")]
    config = parse([*here, *asked], 4)
    for rank in (0, 1):
        with suppress(MemoryError), Profile(config, grid(rank), *quiet(said)) as profile:
            profile.step()
            if fails:
                raise MemoryError
    (first, begun), (second, dumped), (third, ended) = calls  # of --profile-ranks 1 alone
    assert [first, second, third] == [
        "_record_memory_history", "_dump_snapshot", "_record_memory_history"
    ]  # fmt: skip
    path = "deep/m_rank1.pickle"
    assert path in dumped.values() and (tmp_path / "deep").is_dir()
    assert ended == {"enabled": None} and begun["max_entries"] > 0
    assert said == [f"memory history: {path}; open it at https://pytorch.org/memory_viz"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_memory_history_says_what_it_needs_on_a_cpu(more):
    asked = [*FLAGS, "--record-memory-history", "--device", "cpu", *more]
    with pytest.raises(ValueError, match="--record-memory-history needs --device cuda: .*--rehear"):
        parse(asked, 4)
