# SPDX-License-Identifier: Apache-2.0
"""--nccl-communicator-config-path: Megatron's file is obeyed, and a mistake in it is named."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from mpu import grid as grid_module
from mpu.grid import Grid, group_options
from mpu.launch import Launch
from tests.training.small_llama import read
from training.settings.config import UsageError
from training.settings.nccl import nccl_groups

FILE = """
dp:
  cga_cluster_size: 2
  max_ctas: 16
  min_ctas: 4
tp: {max_ctas: 8, net_name: IB, is_high_priority_stream: false}
expt_dp: {min_ctas: 1}
"""
FOUND = {
    "dp": {"cga_cluster_size": 2, "max_ctas": 16, "min_ctas": 4},
    "tp": {"max_ctas": 8, "net_name": "IB", "is_high_priority_stream": False},
    "edp": {"min_ctas": 1},
}


def written(tmp_path, text: str) -> str:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    return str(path)


def test_megatrons_file_is_read(tmp_path):
    assert nccl_groups(None) == {} == nccl_groups(written(tmp_path, ""))
    (tmp_path / "more").mkdir()
    assert nccl_groups(written(tmp_path / "more", FILE)) == FOUND


def test_json_is_read_without_pyyaml(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert nccl_groups(written(tmp_path, '{"tp": {"max_ctas": 8}}')) == {"tp": {"max_ctas": 8}}
    (tmp_path / "more").mkdir()
    with pytest.raises(UsageError, match="reading YAML needs PyYAML"):
        nccl_groups(written(tmp_path / "more", FILE))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dq: {max_ctas: 1}", "dq is not a group: the groups are tp, cp, dp,"),
        ("tp: 3", "tp must be a table of settings"),
        ("tp: {ctas: 3}", "tp: 'ctas' is none of min_ctas, max_ctas"),
        ("tp: {max_ctas: many}", "tp: max_ctas is 'many', not of type int"),
        ("tp: {max_ctas: true}", "tp: max_ctas is True, not of type int"),
        ("tp: {max_ctas: 65}", "tp: max_ctas 65 must be 0 to 64"),
        ("tp: {min_ctas: 9, max_ctas: 8}", "tp: min_ctas 9 is more than max_ctas 8"),
        ("- tp", "must be a table of groups"),
        ("tp: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_mistake_names_file_group_and_rule(tmp_path, text, says):
    path = str(tmp_path / "none.yaml") if text is None else written(tmp_path, text)
    with pytest.raises(UsageError, match="--nccl-communicator-config-path .*") as caught:
        nccl_groups(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_flag_is_read_by_the_run(tmp_path):
    config = read(f"--nccl-communicator-config-path {written(tmp_path, FILE)}", 4)
    assert config.parallel.nccl_communicator_config_path.endswith("nccl.yaml")


class Options:
    def __init__(self, is_high_priority_stream):
        self.high, self.config = is_high_priority_stream, SimpleNamespace()


def test_options_are_those_of_nccl(monkeypatch):
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(grid_module.dist, "ProcessGroupNCCL", nccl, raising=False)
    wait = timedelta(minutes=1)
    plain = group_options(wait, True, {})
    assert plain.high and vars(plain.config) == {} and plain._timeout == wait
    given = group_options(wait, True, FOUND["tp"])
    assert not given.high and vars(given.config) == {"max_ctas": 8, "net_name": "IB"}
    assert not group_options(wait, False, FOUND["dp"]).high


def test_a_group_with_settings_is_one_of_its_own(monkeypatch):
    made = []

    def group(ranks, timeout, pg_options=None, **more):
        made.append((tuple(ranks), pg_options))
        return SimpleNamespace(ranks=ranks)

    monkeypatch.setattr(grid_module.dist, "new_group", group)
    monkeypatch.setattr(grid_module.dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(
        grid_module, "group_options", lambda timeout, urgent, settings: (urgent, dict(settings))
    )
    for name in ("_meet", "_meet_neighbours"):
        monkeypatch.setattr(Grid, name, lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    grid = Grid(4, 2, 1, 1, Launch(0, 4), "nccl", nccl=FOUND)
    grid.add_groups(torch.device("cpu"), timedelta(seconds=1))
    assert ((0, 1), (True, FOUND["tp"])) in made
    assert ((0, 2), (False, FOUND["dp"])) in made
    assert len(made) == len({str(each) for each in made}), "a group is made twice"


@pytest.mark.parametrize("pp, meets", [(1, ["_meet"]), (2, ["_meet", "_meet_neighbours"])])
def test_the_neighbours_of_a_pipeline_meet_before_the_first_step(monkeypatch, pp, meets):
    called = []
    monkeypatch.setattr(grid_module, "group_options", lambda timeout, urgent, settings: None)
    monkeypatch.setattr(grid_module.dist, "new_group", lambda *given, **more: "group")
    monkeypatch.setattr(grid_module.dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for name in ("_meet", "_meet_neighbours"):
        monkeypatch.setattr(Grid, name, lambda self, device, name=name: called.append(name))
    grid = Grid(2, 1, 1, pp, Launch(0, 2), "nccl")  # two stages, or two data-parallel ranks
    grid.add_groups(torch.device("cpu"), timedelta(seconds=1))
    assert called == meets
