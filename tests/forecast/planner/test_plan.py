# SPDX-License-Identifier: Apache-2.0
"""plan.py ranks layouts whose flags the trainer takes, with the memory that --dry-run tells."""

import json
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from forecast.device_file import FOLDER as DEVICES
from forecast.dry_run import memory
from forecast.fit import available
from forecast.planner import search, table
from forecast.planner.cluster import FOLDER, Cluster, ClusterError, read_cluster
from forecast.planner.constants import own
from forecast.planner.layout import RECOMPUTE, SCHEDULES, Layout
from forecast.planner.model import REST, last_of_each, read_model
from forecast.planner.played import Worker
from forecast.planner.recorded import Recorded, play
from forecast.planner.search import Plans
from forecast.recording import HOST, record
from forecast.rehearsal.clock import Timing
from tests.sampling import sampled
from tools import plan
from training.flags.parse import parse
from training.run.model_profile import model_profile
from training.run.waiting import Progress
from training.settings.config import Config, UsageError

SMALL = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --vocab-size 32000"
)
UNTIED = f"{SMALL} --untie-embeddings-and-output-weights"
ARGV = [UNTIED, "2x8xh100", "--seq-length", "1024", "--top", "1"]


@pytest.fixture(scope="module")
def searched() -> tuple[Plans, list[str]]:
    """Return the plans of a small model, and the lines of progress of their search."""
    progress, lines = Progress(), []
    asked: plan.Question = {"seq-length": 1024}
    found = plan.plans_of(UNTIED, read_cluster("h100_8_nodes").of(2), asked, progress=progress)
    lines.append(str(progress))
    list(found.chosen(1))
    lines.append(str(progress))
    return found, lines


@pytest.fixture(scope="module")
def plans(searched: tuple[Plans, list[str]]) -> Plans:
    return searched[0]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as found:
        yield found


def config_of(run: Recorded) -> Config:
    rest = REST.replace("--bf16 ", "")  # the command has it
    return parse([*shlex.split(run.command), *rest.split()], run.cluster.gpus)


def dry_run_bytes(run: Recorded) -> float:
    """Return the bytes of a layout's fullest pipeline rank, each of which is recorded."""
    config = config_of(run)
    ranks = [memory(config, each) for each in record(config, pretrain_llama).values()]
    return max(float(sum(kinds.values())) for kinds in ranks)


def test_a_cluster_of_a_known_gpu_needs_no_file() -> None:
    one, four = read_cluster("8xrtx-4090"), read_cluster("4x8xA100-40")
    assert (one.nodes, one.node, one.gpus) == (1, 8, 8) and one.levels[0].bandwidth == 32e9
    assert (four.nodes, four.gpus, four.levels[0].bandwidth) == (4, 32, 300e9)
    assert one.limit == available(24e9)
    for name, why in (("8xmi300x", "AMD's ROCm"), ("0x8xh100", "at least one node")):
        with pytest.raises(ClusterError, match=f"^{name}: .*{why}"):
            read_cluster(name)


def test_the_last_of_each_flag_counts_in_either_spelling() -> None:
    words = "--lr 1 --param-group *norm* frozen --lr=2 --param-group head.* frozen --bf16".split()
    assert last_of_each(words) == words[2:]


@pytest.mark.parametrize("length", ["--seq-length 2048", "--seq-length=2048", "--seq_length 2048"])
def test_the_length_of_a_models_flags_is_the_plans(length: str) -> None:
    cluster, few = read_cluster("8xh100"), f"{SMALL} {length}"
    assert plan.model_of(few, cluster, {}).config.model.seq_length == 2048
    assert plan.batch_of(cluster, {}, plan.model_of(few, cluster, {})) == 2048
    assert plan.model_of(few, cluster, {"seq-length": 1024}).config.model.seq_length == 1024
    assert plan.model_of(SMALL, cluster, {}).config.model.seq_length == 8192


def test_a_layout_with_a_schedule_of_batch_sizes_is_planned_for_the_largest() -> None:
    flags = "--step-batch-size-schedule '0:64 10000:128' --micro-batch-size 1"
    found = plan.named_by(SMALL, read_cluster("8xh100"), {}, flags)
    assert found.flags == "--micro-batch-size 1 --global-batch-size 128"
    assert found.config.batch.global_batch_size == 128


def test_a_recipe_of_float8_leaves_out_the_sizes_that_it_does_not_allow() -> None:
    cluster, wide = read_cluster("8xh100"), f"{SMALL} --kv-channels 128"
    model = read_model(wide.replace("1536", "1280"), 1024)
    every, cut = (
        {tp for tp, _, _ in search.choose(model, cluster, d)} for d in ("bf16", "blockwise")
    )
    assert (every, cut) == ({1, 2, 4}, {1, 2})  # at 4 a rank has 320 columns of an MLP
    with pytest.raises(UsageError, match="1500"):
        search.choose(read_model(wide.replace("1536", "1500"), 1024), cluster, "blockwise")


def test_a_device_with_one_level_or_three_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = json.loads((DEVICES / "h100.json").read_text())
    first, last = h100["levels"]
    monkeypatch.chdir(tmp_path)
    for levels in ([last], [first, {**last, "ranks": 64}, last]):
        Path("device.json").write_text(json.dumps({**h100, "levels": levels}))
        assert own("device.json")["network.ring.Simple"] > 0
        assert len(read_cluster("2x8xdevice.json").levels) == 2


def test_ada_has_float8() -> None:
    search.check_dtype(read_cluster("8xl40s"), "tensorwise")


def test_a_long_search_says_how_far_it_is(searched: tuple[Plans, list[str]]) -> None:
    times, memory = searched[1]
    assert re.fullmatch(r"computing the times of [\d,]+ layouts", times)
    assert memory == "computing the memory of the fastest layouts: 1 of 1 layouts"


def agree(chosen: Sequence[Recorded]) -> None:
    """Hold a layout's bytes, as the table prints them, to --dry-run's own."""
    for run in chosen:
        assert run.bytes == pytest.approx(dry_run_bytes(run), rel=0.02), run.flags


def spread(plans: Plans, count: int) -> list[Recorded]:
    draw = random.Random(5)
    kinds = {(e.pp > 1, e.schedule, e.offload): n for n, e in enumerate(plans.layouts)}
    rest = draw.sample(range(len(plans.layouts)), count)
    return [plans.recorded(n) for n in [*kinds.values(), *rest][:count]]


def test_the_flags_parse_and_the_memory_is_the_dry_runs(plans: Plans) -> None:
    agree(spread(plans, 2))


@pytest.mark.prove
def test_the_memory_is_the_dry_runs_on_many_layouts(plans: Plans) -> None:
    agree(spread(plans, 12))
    for name, cluster, nodes in (("8B", "h100_8_nodes", 1), ("70B", "h100_8_nodes", 8),
                                 (SMALL, "a100_16_nodes", 2)):  # fmt: skip
        found = plan.plans_of(name, read_cluster(cluster).of(nodes), {"seq-length": 4096})
        agree(found.chosen(1))


@pytest.mark.parametrize("count", sampled([1, 3], 2))
def test_the_table_is_in_order_and_its_parts_add_up(
    plans: Plans, worker: Worker, count: int
) -> None:
    best = play(plans.chosen(count), worker)
    seconds = [run.played.step_seconds for run in best]
    assert seconds == sorted(seconds) and all(run.fits for run in best)
    lines = table.ranking(plans, best, 1e9, {})
    assert lines[1].split()[:4] == ["step", "s", "tokens/s/GPU", "MFU"]
    printed = "\n".join(part for line in lines for part in table.wrapped(line))
    assert max(map(len, printed.splitlines())) <= 100
    assert f"{seconds[0]:.2f}" in lines[2] and "tp " in lines[2]
    steps = next(n for n, line in enumerate(lines) if line.split() == list(table.TERMS))
    memory_at = next(n for n, line in enumerate(lines) if line.endswith("working memory"))
    for number, run in enumerate(best):
        shares = [float(word.rstrip("%")) for word in lines[steps + 1 + number].split()[1:]]
        assert sum(shares) == pytest.approx(100, abs=0.5) and len(shares) == len(table.TERMS)
        kinds = [float(word) for word in lines[memory_at + 1 + number].split()[1:]]
        assert sum(kinds) == pytest.approx(run.bytes / 1e9, abs=0.04)
    words = shlex.split(lines[-1].replace("\\\n", " "))
    assert words[:2] == ["torchrun", "--nnodes"]
    argv = words[words.index("pretrain_llama.py") + 1 :]
    taken = search.recommended(best)
    same = parse([*taken.command.split(), *table.EXAMPLE.split()], plans.cluster.gpus)
    assert parse(argv, plans.cluster.gpus) == same


@pytest.mark.prove
def test_groups_of_parameters_are_planned_and_printed_for_a_shell() -> None:
    """A flag that may be repeated stays, and what is frozen takes less memory."""
    groups = ("*norm* lr-mult=0.5", "layers.[4-7].* frozen")
    flags = " ".join(f"--param-group '{group}'" for group in groups)
    plain, some = (
        plan.plans_of(f"{SMALL} {more}", read_cluster("h100_8_nodes").of(2), {"seq-length": 1024})
        for more in ("", flags)
    )
    assert read_model(f"{SMALL} {flags}", 1024, "muon").config.optimizer.param_group == groups
    (run,) = some.chosen(1)
    assert config_of(run).optimizer.param_group == groups
    assert run.bytes < replace(run, model=plain.model).bytes


@pytest.mark.parametrize(("top", "expected"), [(1, [1]), (3, [1, 3, 4]), (9, [1, 3, 4, 5, 2])])
def test_each_row_has_an_advantage_over_those_before(
    top: int, expected: list[int], plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [  # seconds, mechanisms and GB, as they are estimated and recorded; 73.7 GB can be used
        (1.0, 0, 70, 90), (2.0, 2, 60, 60), (3.0, 2, 55, 55), (4.0, 3, 40, 40), (5.0, 2, 40, 40),
        (6.0, 1, 60, 60), (7.0, 0, 90, 60),
    ]  # fmt: skip
    layouts = list[Layout]()
    for _, mechanisms, _, _ in rows:
        layouts.append(next(e for e in plans.layouts if e not in layouts
                            and e.mechanisms == mechanisms))  # fmt: skip
    seconds, _, estimated, recorded = np.array(rows, float).T
    some = replace(plans, layouts=layouts, bytes=1e9 * estimated,
                   times=replace(plans.times, step=seconds))  # fmt: skip
    of = {e.flags(): 1e9 * gb for e, gb in zip(layouts, recorded, strict=True)}
    monkeypatch.setattr(Recorded, "bytes", property(lambda run: of[run.flags]))
    monkeypatch.setattr(Recorded, "in_host", 0.0)
    assert [run.flags for run in some.chosen(top)] == [layouts[n].flags() for n in expected]


@pytest.mark.parametrize(
    ("rows", "taken"),  # of each row: seconds, mechanisms, GB
    [
        ([(10.0, 3, 60), (10.4, 1, 40), (10.6, 0, 20)], 1),  # the last is 6 % slower
        ([(10.0, 2, 60), (10.1, 2, 40), (10.2, 3, 10)], 1),
        ([(10.0, 2, 60), (10.4, 0, 73)], 0),  # 73.7 GB can be used
        ([(10.0, 2, 73), (10.4, 0, 73)], 1),
        ([(10.0, 2, 60), (20.0, 0, 10)], 0),
    ],
)
def test_the_layout_to_take_is_the_simplest_of_those_that_time_does_not_tell_apart(
    rows: list[tuple[float, int, int]], taken: int, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "bytes", property(lambda run: 1e9 * float(run.flags)))
    runs = [
        Recorded(plans.model, plans.cluster, str(gb), mechanisms, Timing(seconds))
        for seconds, mechanisms, gb in rows
    ]
    assert search.recommended(runs) is runs[taken]


@pytest.mark.prove
def test_the_distance_to_the_edges_is_the_dry_runs(tmp_path: Path, worker: Worker) -> None:
    """Of one offloaded layout: GB left of a GPU's, of a node's host memory, and the host's time."""
    content = json.loads((FOLDER / "h100_8_nodes.json").read_text()) | {"host_memory_gb": 10}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    for layout in ("--zero-stage 1 --micro-batch-size 2",
                   "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
                   "--sequence-parallel --micro-batch-size 1"):  # fmt: skip
        flags = f"{layout} --cpu-offload-activations --global-batch-size 64"
        (mine,) = play([run_of(flags, read_cluster(str(path)).of(2))], worker)
        device, share, host, host_share, busy = table.edges_of([mine])[-1].split()[1:]
        ranks = record(config_of(mine), pretrain_llama).values()
        kept = 8 * max(rank.most(HOST) for rank in ranks)
        assert kept > 2e8 and float(host) == pytest.approx((8e9 - kept) / 1e9, abs=0.06)
        assert float(host_share.rstrip("%")) == pytest.approx(100 - kept / 0.8e8, abs=0.2)
        left = mine.cluster.limit - dry_run_bytes(mine)
        assert float(device) * 1e9 == pytest.approx(left, rel=0.02)
        assert float(share.rstrip("%")) == pytest.approx(100 * left / 80e9, rel=0.02)
        assert 0.05 < float(busy.rstrip("%")) / 100 <= 1.01
    plain = run_of("--micro-batch-size 1 --global-batch-size 64", read_cluster(str(path)).of(2))
    plain.timing = mine.timing
    assert table.edges_of([plain])[-1].split()[3:5] == ["-", "-"]


def run_of(flags: str, cluster: Cluster) -> Recorded:
    return Recorded(read_model(UNTIED, 1024), cluster, flags)


def test_activations_stay_out_of_host_memory_that_a_cluster_does_not_have(tmp_path: Path) -> None:
    content = json.loads((FOLDER / "h100_8_nodes.json").read_text()) | {"nodes": 1}
    asked: plan.Question = {"seq-length": 1024, "global-batch-size": 16}
    (tmp_path / "c.json").write_text(json.dumps(content | {"host_memory_gb": 1}))
    small = plan.plans_of(UNTIED, read_cluster(str(tmp_path / "c.json")), asked)
    large = plan.plans_of(UNTIED, read_cluster("h100_8_nodes").of(1), asked)
    assert small.layouts == large.layouts
    away = np.array([e.offload for e in small.layouts])
    assert small.cluster.host == 0.8e9 and np.all(small.bytes[~away] == large.bytes[~away])
    assert np.any(small.fits[away]) and np.any(large.fits[away] & ~small.fits[away])


@pytest.mark.prove
def test_state_in_host_memory_is_tried_where_a_layout_does_not_fit_without() -> None:
    """8B on a node with a batch of few micro-batches: its memory, its copies, and --why."""
    asked: plan.Question = {"seq-length": 8192, "global-batch-size": 16}
    plans = plan.plans_of("8B", read_cluster("h100_8_nodes").of(1), asked)
    away = [n for n, e in enumerate(plans.layouts) if e.states]
    plain = {e: n for n, e in enumerate(plans.layouts) if not e.states}
    assert any(plans.fits[n] for n in away)
    for n in away:
        same = plain[replace(plans.layouts[n], states=False)]
        assert not plans.fits[same] and plans.bytes[n] < plans.bytes[same]
        assert plans.times.step[n] > plans.times.step[same]
    n = min(away, key=lambda n: plans.times.step[n] if plans.fits[n] else np.inf)
    run = plans.recorded(n)
    assert plans.bytes[n] == pytest.approx(dry_run_bytes(run), rel=0.05)
    assert run.bytes == pytest.approx(dry_run_bytes(run), rel=0.02)
    ranks = record(config_of(run), pretrain_llama).values()
    assert run.in_host == 8 * max(rank.most(HOST) for rank in ranks) > 0


def test_every_layout_that_the_flags_allow_is_there_once(plans: Plans) -> None:
    assert len(set(plans.layouts)) == len(plans.layouts)
    each = plans.layouts[0]
    batch = each.dp * each.micro_batch * each.micro_batches
    for layout in plans.layouts:
        assert layout.tp * layout.cp * layout.pp * layout.dp == 16
        assert layout.dp * layout.micro_batch * layout.micro_batches == batch
    assert {layout.tp for layout in plans.layouts} == {1, 2, 4}  # 4 key and value heads
    whole = Layout(2, 4, 2, 2, 1, batch // 2, 1, "full", schedule="interleaved", overlap="ring")
    assert whole in plans.layouts or replace(whole, overlap="none") in plans.layouts
    assert {e.schedule for e in plans.layouts} == {name for name, _ in SCHEDULES}
    assert {e.zero for e in plans.layouts} == {0, 1, 2, 3}
    assert {e.recompute for e in plans.layouts} == set(RECOMPUTE)


@pytest.mark.prove
def test_why_adds_up_on_pairs_of_layouts(plans: Plans, worker: Worker) -> None:
    """The terms' differences sum to the steps' difference, as printed."""
    draw = random.Random(7)
    some = [plans.recorded(n) for n in draw.sample(range(len(plans.layouts)), 4)]
    play(some, worker)
    for mine, other in pairwise(some):
        lines = table.why(mine, other)
        assert any(line.startswith("seconds of a step: 4,096 sequences of 1,024") for line in lines)
        meanings = [meaning for meaning, _ in table.TERMS.values()]
        rows = {key: line for key in (*meanings, "step") for line in lines
                if line.startswith(f"{key}  ")}  # fmt: skip
        told = {key: [float(word) for word in row[len(key) :].split()] for key, row in rows.items()}
        assert len(told) == len(table.TERMS) + 1
        for column in range(3):
            parts = [values[column] for key, values in told.items() if key != "step"]
            assert sum(parts) == pytest.approx(told["step"][column], abs=0.006)
        for column, run in enumerate((mine, other)):
            assert told["step"][column] == pytest.approx(run.played.step_seconds, abs=0.001)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("more", "flags", "said"),
    [
        (("--global-batch-size", "64"), "--zero-stage 1",
         ["seconds of a step: 64 sequences of 1,024 tokens", "for a step"]),
        (("--global-batch-size", "4096"), "--global-batch-size 64",
         ["seconds of 1,000,000 tokens, as the two do different work", "yours 64 sequences of",
          "best 4,096 sequences of", "for a token"]),
        ((), "--global-batch-size 64 --seq-length 512", ["yours 64 sequences of 512 tokens, matm",
                                                         "best 64 sequences of 1,024 tokens"]),
        (("--float8", "tensorwise"), "--global-batch-size 64",
         ["64 sequences of 1,024 tokens, matmuls in bf16; best", "matmuls in tensorwise"]),
    ],
)  # fmt: skip
def test_why_says_what_is_compared(
    more: tuple[str, ...], flags: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*ARGV, *more, "--why", flags]) == 0
    out = capsys.readouterr().out.replace("\n", " ")  # lines of at most 100 columns
    assert [part for part in said if part not in out] == []
    assert "0.00 times" not in out


@pytest.mark.prove
def test_nothing_that_fits_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["405B", "h100_8_nodes", "--nodes", "1", "--global-batch-size", "8"]
    assert plan.main(argv) == 1
    assert "none fits 73.7 GB; the smallest needs" in capsys.readouterr().out
    assert plan.main([*argv, "--why", "--tensor-model-parallel-size 8 --sequence-parallel"]) == 1
    assert "it needs " in capsys.readouterr().out


@pytest.mark.prove
def test_the_update_is_the_hosts_where_nothing_else_fits() -> None:
    """70B on a node of H200s: the flags that fit, with --dry-run's memory."""
    plans = plan.plans_of("70B", read_cluster("8xh200"), {"global-batch-size": 64})
    assert not any(plans.fits[n] for n, e in enumerate(plans.layouts) if not e.on_host)
    (run,) = plans.chosen(1)
    n = next(n for n, e in enumerate(plans.layouts) if e.flags() == run.flags)
    assert "--optimizer-cpu-offload" in run.command and run.bytes < plans.limit
    assert plans.bytes[n] == pytest.approx(run.bytes, rel=0.1)


@pytest.mark.parametrize(
    ("faster", "slower", "has"),  # GB that layouts of as many mechanisms leave, of 80
    [(1.0, 4.5, True), (4.5, 6.0, False), (1.0, 3.5, False), (4.5, 13.0, True), (6.0, 1.0, False)],
)
def test_a_slower_layout_is_of_interest_where_the_faster_one_is_a_risk(
    plans: Plans, faster: float, slower: float, has: bool
) -> None:
    some = replace(plans, layouts=plans.layouts[:1] * 2)
    some = replace(some, bytes=plans.limit - 1e9 * np.array([faster, slower]))
    assert some._has_advantage(1, over=0) == has


@pytest.mark.parametrize(
    "name", sampled(["llama3.1-70b", "7B", "13B", "qwen3-30b", "mixtral"], 4)
)
def test_models_by_name(name: str) -> None:
    model = read_model(name, 4096)
    billions = {"7B": 6.7, "13B": 13.0, "llama3.1-70b": 70.6, "mixtral": 46.7, "qwen3-30b": 30.5}
    profile = model_profile(model.config, pretrain_llama.model_provider)
    assert profile.parameters / 1e9 == pytest.approx(billions[name], abs=0.06)


def test_a_hugging_face_config_is_the_same_model(tmp_path: Path) -> None:
    content = {
        "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_model(str(tmp_path), 1024).config.model == read_model(UNTIED, 1024).config.model
    newer = content | {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 10000.0}}
    (tmp_path / "config.json").write_text(json.dumps(newer))  # as of transformers 5
    assert read_model(str(tmp_path), 1024).config.model == read_model(UNTIED, 1024).config.model
    mixtral = content | {"model_type": "mixtral", "num_local_experts": 8, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    flags = f"{UNTIED} --num-experts 8 --moe-router-topk 2"
    assert read_model(str(tmp_path), 1024).config.moe == read_model(flags, 1024).config.moe
    (tmp_path / "config.json").write_text(json.dumps(content | {"n_routed_experts": 8}))
    assert not read_model(str(tmp_path), 1024).experts  # a field that a Llama does not have
    gemma = content | {"model_type": "gemma2"}  # it was planned as a Llama
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    with pytest.raises(ValueError, match=r"give --model-file examples/forks/gemma2\.py$"):
        read_model(str(tmp_path), 1024)
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "qwen3"}))
    qwen = read_model(str(tmp_path), 1024)
    assert qwen.config.model.model_file == "model/qwen3.py"
    assert (qwen.config.model.num_query_groups, qwen.config.model.kv_channels) == (4, 128)
    granite = content | {"model_type": "granite", "embedding_multiplier": 12.0}
    (tmp_path / "config.json").write_text(json.dumps(granite))
    with pytest.raises(ValueError, match=r"no flags of model/llama\.py give embedding_multiplier:"):
        read_model(str(tmp_path), 1024)  # the command lost it
    (tmp_path / "config.json").write_text(json.dumps(granite | {"residual_multiplier": 0.22}))
    with pytest.raises(ValueError, match=r"; --model-file examples/forks/granite\.py supports it$"):
        read_model(str(tmp_path), 1024)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="it must be a JSON object"):
        read_model(str(tmp_path), 1024)


def test_a_plan_takes_a_fork_s_own_flags_and_no_checkpoint() -> None:
    fork = "--model-file examples/forks/windows.py --window-size 8"
    assert dict(read_model(f"{UNTIED} {fork}", 64).config.extra)["window_size"] == 8
    with pytest.raises(ValueError, match="--use-checkpoint-args: give the model's sizes: no check"):
        read_model(f"{UNTIED} --use-checkpoint-args --load saved", 64)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            [SMALL + " --num-experts 8 --moe-layer-freq 2", "h100_8_nodes"],
            "it has both dense layers and layers with experts",
        ),
        (["9B", "h100_8_nodes"], "9B: not a file, flags in quotes, or a known model"),
        (["8B", "h100"], "h100: no cluster file h100.json; the known names are a100_16_n"),
        (["8B", "8xmi300x"], "AMD's ROCm"),
        ([SMALL.replace(" --vocab-size 32000", ""), "h100_8_nodes"], "--vocab-size is missing"),
        ([SMALL + " --num-layer 3", "h100_8_nodes"], "--num-layer"),
        (
            ["1B", "a100_16_nodes", "--float8", "tensorwise"],
            "8.9 or more (Ada, Hopper, Blackwell): NVIDIA A100",
        ),
        (["1B", "h100_8_nodes", "--float8", "mxfp8"], "10.0 or more (Blackwell); on Hopper use b"),
        (
            ["1B", "h100_8_nodes", "--why", "--fp8-format e4m3 --fp8-recipe mxfp8"],
            "--fp8-recipe mxfp8 needs a GPU of",
        ),
        (
            ["1B", "h100_8_nodes", "--why", "--num-layers 8"],
            "--num-layers in a layout's flags changes the model, 1B",
        ),
        ([SMALL, "h100_8_nodes", "--seq-length", "64", "--global-batch-size", "1"], "no layout of"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_broken_cluster_file_is_named(tmp_path: Path) -> None:
    good = json.loads((FOLDER / "h100_8_nodes.json").read_text())
    for key, value, said in (("nodes", 0, "nodes is 0"), ("device", "v100", "v100: it has no bf"),
                             ("source", "", "it must say where"), ("speed", 1, "must be an object"),
                             ("oversubscription", 0.5, "oversubscription is 0.5"),
                             ("host_memory_gb", -1, "host_memory_gb is -1")):  # fmt: skip
        path = tmp_path / "c.json"
        path.write_text(json.dumps({**good, key: value}))
        with pytest.raises(ClusterError, match=said):
            read_cluster(str(path))
