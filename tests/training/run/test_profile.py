# SPDX-License-Identifier: Apache-2.0
"""--profile: which ranks write a trace, and what a pipeline rank records of a step."""

import json
import types

import torch

from mpu.grid import Grid, Launch
from mpu.pipeline.schedules import build
from training.flags.parse import parse
from training.run.profile import Profile

FLAGS = """--mock-data --vocab-size 100 --num-layers 4 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --lr 1e-3 --train-iters 3 --profile --profile-step-start 1 --profile-step-end 3
    --pipeline-model-parallel-size 2 --global-batch-size 4 --profile-ranks 1 --device cpu""".split()


def grid(rank: int) -> Grid:
    return Grid(4, 1, 1, 2, Launch(rank, 4))


def test_only_the_ranks_asked_for_are_traced():
    config, engine = parse(FLAGS, 4), types.SimpleNamespace(spans=None)
    assert Profile(config, grid(0), engine)._trace is None
    assert isinstance(Profile(config, grid(1), engine)._trace, torch.profiler.profile)


def test_the_first_pipeline_writes_when_each_action_ran(tmp_path, monkeypatch):
    """The engine is asked for spans in the steps wanted; those of the last one are written."""
    monkeypatch.chdir(tmp_path)
    config, schedule = parse(FLAGS, 4), build("1f1b", 2, 2)
    for rank in range(4):
        engine = types.SimpleNamespace(spans=None, schedule=schedule)
        asked = []
        with Profile(config, grid(rank), engine) as profile:
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
