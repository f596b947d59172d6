# SPDX-License-Identifier: Apache-2.0
"""Whole runs with --param-group: saved, resumed here and on other layouts, changed, and refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from pretrain_llama import main
from tests.cached_runs import CachedRuns
from tests.launcher import Launcher, Result
from tests.sampling import sampled
from tests.saved import tensors
from tests.test_frozen_run import (
    AT,
    KINDS,
    LAYOUTS,
    MORE,
    STEPS,
    check_resume,
    check_resumes_of_all,
    check_rows,
    rows,
)
from tests.test_frozen_run import MODEL as FROZEN_MODEL
from training.flags.parse import UsageError, parse

MODEL = FROZEN_MODEL.replace("--model-file tests/model/frozen_fork.py", "")
GROUPS = {
    "factors": ["*norm* lr-mult=0.25", "layers.[01].* head.* lr-mult=3 wd-mult=0"],
    "embedding": ["* frozen", "model.embed_tokens.weight lm_head.* trained lr-mult=2"],
    "layers": ["layers.[02].* frozen", "* wd-mult=2", "*norm* lr-mult=0"],
}


def words(groups: list[str]) -> list[str]:
    return [word for group in groups for word in ("--param-group", *group.split())]


class Runs(CachedRuns):
    """Runs of MODEL, with groups on a layout."""

    def run(self, name: str, layout: str, load: Path | None = None) -> Result:
        ranks, flags = LAYOUTS[layout]
        return self.once(ranks, f"{MODEL} {flags} --fp64 {' '.join(words(GROUPS[name]))}", load)


@pytest.fixture(scope="module")
def runs(launcher: Launcher) -> Runs:
    return Runs(launcher, AT)


@pytest.mark.parametrize("layout", sampled(["ZeRO 3", "pp 2", "tp 2"], 3))
@pytest.mark.parametrize("name", sampled(sorted(GROUPS), 3))
def test_groups_train_and_resume(runs: Runs, name: str, layout: str) -> None:
    """As on one rank; a resume on the same layout has the same bits."""
    one, here = runs.run(name, "one"), runs.run(name, layout)
    check_rows(rows(here), rows(one), 1e-10)
    first, last = (tensors(here.folder / "saved", step) for step in (AT, STEPS))
    weights = {n for n in last if n.rpartition(".")[2] not in KINDS}
    still = {n for n in weights if torch.equal(first[n], last[n])}
    stays = {
        "factors": (),
        "embedding": ("model.layers.", "model.norm"),
        "layers": ("model.layers.0.", "model.layers.2.", "model.norm"),
    }[name]
    if name == "layers":  # norms have no learning rate
        stays = (*stays, *(n for n in weights if "norm" in n))
    assert still == {n for n in weights if n.startswith(stays or ("-",))}
    state = json.loads((here.folder / "saved/step_00000004/state.json").read_text())
    assert state["config"]["optimizer.param_group"] == GROUPS[name]
    assert ("frozen_parameters" in state) == (name != "factors")
    resumed = check_resume(runs, name, layout)
    assert "--param-group" not in resumed.said(0, "out"), "nothing has changed"


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_any_layout_resumes_any_other(runs: Runs, name: str) -> None:
    check_resumes_of_all(runs, name)


def test_a_change_is_said_or_refused(runs: Runs, launcher: Launcher) -> None:
    """Other factors are; another choice of frozen parameters is refused, as a fork's is."""
    saved = runs.run("embedding", "one").folder / "saved"
    flags = MODEL.replace("{dir}/saved", "{dir}/more").split() + ["--fp64", "--load", str(saved)]
    flags += ["--train-iters", "5"]
    ended = launcher.run(1, [*flags, *words(["* frozen", "embedding.* head.* trained"])])
    assert ended.codes == [0], ended.said(0)
    out = ended.said(0, "out")
    assert "was made with --param-group ['* frozen', 'model.embed_tokens.weight lm_head.* tr" in out
    assert "and this run has ['* frozen', 'embedding.* head.* trained']" in out
    assert "25 of 27 tensors are frozen, such as layers.0" in out
    ended = launcher.run(1, flags)
    assert ended.codes == [2]
    assert "is frozen in the checkpoint, not in this run (24 more differ)" in ended.said(0)


@pytest.mark.prove
@pytest.mark.parametrize("mechanism", sorted(MORE))
def test_with_other_mechanisms(launcher: Launcher, mechanism: str) -> None:
    """What is frozen, or has no learning rate, keeps its bits, and the rest moves."""
    ended = launcher.run(2, f"{MODEL} {MORE[mechanism]}".split() + words(GROUPS["layers"]))
    assert ended.codes == [0, 0], ended.said(0)
    first, last = (tensors(ended.folder / "saved", step) for step in (AT, STEPS))
    weights = {n for n in last if n.endswith(".weight")}
    moved = {n for n in weights if not torch.equal(first[n], last[n])}
    assert moved == {n for n in weights if "norm" not in n and not re.search(r"layers\.[02]", n)}


REFUSED = {
    "embeding.weight frozen": "embeding.weight matches no parameter; did you mean embedding.w",
    "layers.4.* frozen": "layers.*.* does, and the last of these is layers.3.mlp.down.w",
    "*.q_proj.* lr-mult=2": "is a part of layers.0.attention.qkv.weight, which also has model.laye",
    "* frozen": "all 27 parameters of the model are frozen, so nothing would train",
    "*norm* wd-mult=2": "wd-mult has no effect: the parameters that it names have no weight",
    "*norm* lr_mult=2": "lr_mult=2 is not a property: these are frozen, trained, lr-mult=X, wd-m",
    "*norm* lr-mult=inf": "lr-mult must be a number >= 0, at most 1000000",
    "*norm*": "there is no property: end with frozen, trained, lr-mult=X, wd-mult=X",
    "frozen": "there is no pattern: give names of parameters first",
    "*norm* frozen head.*": "head.* comes after frozen: patterns come before properties",
    "*norm* frozen wd-mult=2": "wd-mult has no effect on frozen parameters",
    "*norm* lr-mult=2 lr-mult=3": "lr-mult=3: lr-mult is given twice",
    "head.* lr-mult=2 --param-group * lr-mult=3": "lr-mult has no effect: later --param-group fl",
    "head.* lr-mult=2 --param-group h* frozen": "lr-mult has no effect: all parameters that it n",
}


@pytest.mark.parametrize("text", sampled([*REFUSED], 3))
@pytest.mark.parametrize("more", sampled(["--dry-run", "--pipeline-model-parallel-size 2"], 2))
def test_one_sentence_says_what_is_wrong(
    text: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a dry run, and of a run before it meets its other ranks."""
    ranks = "1" if "dry" in more else "2"
    for name, value in dict(
        WORLD_SIZE=ranks,
        LOCAL_WORLD_SIZE=ranks,
        RANK="0",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29999",
    ).items():
        monkeypatch.setenv(name, value)
    argv = MODEL.replace("{dir}/saved", "no/such").split() + more.split()
    assert main([*argv, "--param-group", *text.split()]) == 2
    said, *waits = capsys.readouterr().err.splitlines()
    assert "--param-group" in said and REFUSED[text] in said
    assert all(line.startswith("[rank 0]") for line in waits)  # for the other rank, to tell it


def test_each_use_of_the_flag_adds_one() -> None:
    """Of several words, or of one: of a flag with =, or in a script that quotes all of it."""
    given = "--param-group *norm* head.* lr-mult=0.1 wd-mult=0 --lr 1 --param-group=*|frozen"
    argv = [word.replace("|", " ") for word in [*MODEL.split(), *given.split()]]
    config = parse(argv, 1)
    assert config.optimizer.param_group == ("*norm* head.* lr-mult=0.1 wd-mult=0", "* frozen")
    assert config.flat()["optimizer.param_group"] == [*config.optimizer.param_group]
    without = parse(MODEL.split(), 1)
    assert "optimizer.param_group" not in without.flat(), "older checkpoints have none"
    assert without.digest() != config.digest()
    with pytest.raises(UsageError, match="--param-group: expected at least one argument"):
        parse([*argv, "--param-group"], 1)


def test_tied_embeddings_are_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = MODEL.replace("--untie-embeddings-and-output-weights", "").split()
    argv = [*tied, "--dry-run", "--param-group"]
    assert main([*argv, "head.*", "lr-mult=2"]) == 2
    assert "head.weight is tied to another parameter, whose name counts" in capsys.readouterr().err
    assert main([*argv, "lm_head.*", "frozen"]) == 2
    assert "matches no parameter; the parameters are embedding.weight" in (
        said := capsys.readouterr().err
    )
    assert said.rstrip().endswith("norm.weight; head.weight is tied to one of them")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        main([*argv[:-1], "--pipeline-model-parallel-size", "2", *argv[-1:], "embed*", "frozen"])
        == 0
    )
    assert "1 of 26 tensors are frozen, such as embedding.weight" in capsys.readouterr().out
