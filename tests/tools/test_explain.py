# SPDX-License-Identifier: Apache-2.0
"""A step sends what forecast/traffic.py lists, and `make explain` prints where."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from forecast.explainer.text import columns, sums
from forecast.explainer.timeline import COMPUTE
from forecast.traffic import Traffic
from mpu.grid import Grid
from mpu.pipeline.schedules import NAMES, build
from mpu.pipeline.simulate import Costs, simulate
from mpu.pipeline.steps import plan
from tests.sampling import sampled
from tools.explain import draw_timeline, explain, main, read_arguments
from tools.pictures.style import shapes
from training.run import waiting
from training.settings import batch_size
from training.settings.pipeline_schedule import schedule_of
from training.settings.update_rules import needs_full_matrices

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "parallelism.md"
PIPELINE = DOCUMENT.with_name("pipeline.md")
FULL = "--recompute-granularity full"
ONE_HEAD = "--num-query-groups 1"
FIRST = "--first-last-layers-bf16 --num-layers-at-end-in-bf16 0"
CASES = [
    "--tp 2",
    "--tp 2 --no-sequence-parallel",
    "--tp 2 --micro-batches 3 --layers 1",
    f"--tp 2 {FULL}",
    f"--tp 2 {FULL} --no-sequence-parallel --micro-batches 3",
    f"--tp 2 {FULL} --recompute-method block --layers 3",
    "--tp 2 --recompute-granularity selective",
    "--tp 2 --bf16",
    "--tp 2 --fused-linear-cross-entropy",
    f"--tp 2 {ONE_HEAD} --bf16 {FULL} --micro-batches 2",
    f"--tp 2 --dp 2 {ONE_HEAD} --kv-channels 32 --fp8-recipe rowwise --no-sequence-parallel",
    "--dp 2",
    "--dp 2 --micro-batches 3 --bf16",
    "--tp 2 --dp 2 --micro-batches 3",
    f"--tp 2 --dp 2 --no-sequence-parallel --fp64 {FULL}",
    "--tp 2 --fp8-recipe tensorwise",
    "--tp 2 --dp 2 --fp8-recipe delayed",
    f"--tp 2 --fp8-recipe rowwise {FIRST} {FULL} --layers 3",
    "--tp 2 --fp8-recipe rowwise --fp8-wgrad-bf16 --micro-batches 2",
    "--tp 2 --fp8-recipe tensorwise --no-sequence-parallel",
    "--tp 2 --fp8-recipe blockwise",
    "--tp 2 --dp 2 --fp8-recipe rowwise --zero 1",
    "--dp 2 --fp8-recipe blockwise --zero 3 --micro-batches 3",
    f"--tp 2 --dp 2 --fp8-recipe tensorwise {FULL} --zero 3",
    f"--tp 2 --dp 2 --fp8-recipe mxfp8 {FULL}",
    f"--tp 2 --dp 2 {ONE_HEAD} --qk-clip --output-z-loss-coeff 1e-4",
]
CONTEXT = [
    "--cp 2 --layers 3 --cp-comm-type all_gather",
    f"--cp 2 --layers 3 --cp-comm-type all_gather {FULL} --bf16 --zero 1",
    "--cp 4 --cp-comm-type a2a --micro-batches 2",
    "--tp 2 --cp 2 --recompute-granularity selective",
    "--dp 2 --cp 2 --cp-comm-type a2a --zero 3",
    f"--cp 2 --fp8-recipe tensorwise {FULL} --micro-batches 2",
    "--cp 2 --fp8-recipe blockwise",
    "--tp 2 --cp 2 --fp8-recipe rowwise",
]
PIPELINES = [
    "--pp 2 --schedule gpipe --micro-batches 3",
    "--pp 2 --micro-batches 1 --tied",
    f"--pp 2 --schedule interleaved --layers 5 {FULL}",
    "--pp 2 --schedule zb-v --micro-batches 3 --tied",
    "--pp 2 --schedule v-half --bf16",
    "--pp 2 --layers 3 --pipeline-model-parallel-layout E|tttL",
    "--pp 2 --tp 2 --schedule zb-h1 --micro-batches 3 --tied",
    "--pp 2 --tp 2 --schedule zb-h1 --fused-linear-cross-entropy",
    "--pp 2 --tp 2 --fused-linear-cross-entropy --defer-embedding-wgrad-compute",
    f"--pp 2 --tp 2 --schedule zb-v --tied {FULL}",
    "--pp 2 --tp 2 --schedule interleaved --no-sequence-parallel --tied",
    "--pp 2 --dp 2 --tied --micro-batches 3 --fp64",
    "--pp 2 --dp 2 --schedule v-half --layers 6",
    "--pp 4 --schedule interleaved",
    "--pp 4 --schedule zb-h1 --tied",
    f"--pp 2 --tp 2 --schedule zb-h1 --fp8-recipe tensorwise {FIRST}",
    "--pp 2 --tp 2 --schedule zb-h1 --fp8-recipe rowwise --fp8-wgrad-bf16",
]


def config_of(words):
    return read_arguments(words.split())[0]


def step_of(comm, words):
    """Return the config of a command line, and the grid of this world for it."""
    config = config_of(words)
    p = config.parallel
    return config, comm.grid(
        p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size,
        p.num_distributed_optimizer_instances, query_groups=config.model.num_query_groups,
        ep=config.expert_model_parallel_size, needs_full_matrices=needs_full_matrices(config),
    )  # fmt: skip


def run(comm, words):
    """Explain one step on a rank of the world; every rank must count what is worked out."""
    config, grid = step_of(comm, words)
    found = explain(config, grid)
    assert found.equal and found.counted == found.stated
    story = found.text
    if grid.pp.size > 1:
        ranks = [f"pipeline rank {rank}" for rank in range(grid.pp.size)]
        assert [each.rank for each in found.streams] == ranks
        story = story.split("=== pipeline rank ")[1 + grid.pp.rank].partition("=== the whole")[0]
    check_streams(found.streams[grid.pp.rank], found.counted, story)
    return found.counted, found.text


def check_streams(streams, counted, text):
    """Hold a timeline to the text: as many transfers, and each hides as many matmuls."""
    transfers = [box for box in streams.boxes if box.stream != COMPUTE]
    before = text.partition("started by the update of the previous step")[2].partition("\n---")[0]
    early = Counter(re.findall(r"^ {5}.*? (\w+) +of \d+ .* async  ", before, re.M))
    stated = Counter(axis for (axis, _), (times, _) in counted.items() for _ in range(times))
    assert Counter(box.stream for box in transfers) == stated + early
    computed = [box for box in streams.boxes if box.stream == COMPUTE]
    assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(computed))
    waits = [(box.begin, box.end) for box in computed if box.kind == "wait"]
    assert waits == sorted((t.begin, t.end) for t in transfers if t.kind == "waited for")
    under = [
        len({(box.kind, box.layer) for box in computed if box.kind in "FBW"
             and t.begin - 1e-9 <= box.begin and box.end <= t.end + 1e-9})
        for t in transfers if t.kind == "hidden" and t.what.split()[0] not in ("send", "to", "from")
    ]  # fmt: skip
    said = []
    for line in re.sub(r"\n {18}", " ", text).splitlines():
        if (match := re.search(r"; hidden under(.*)", line)) and "which waits for it" not in line:
            many = re.match(r" (\d+) matmuls", match[1])
            said.append(int(many[1]) if many else match[1].count("matmul of"))
    assert Counter(filter(None, under)) == Counter(filter(None, said))


def line_of(file, text):
    """Return 'file:line' of the first line that holds the text."""
    lines = (ROOT / file).read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def explained(world, words):
    """Return what each rank counts, and the text, of the step of a command line."""
    results = world(config_of(words).parallel.world_size).run(run, words)
    for _, text in results:
        assert text.endswith("All equal.") and "DIFFERS" not in text
        assert max(map(len, text.splitlines())) <= (170 if "--cp" in words else 150)
    return results


@pytest.mark.parametrize("words", sampled(CASES, 12))
def test_what_is_sent_is_worked_out(world, words):
    assert all(counted for counted, _ in explained(world, words))


@pytest.mark.parametrize("words", sampled(CONTEXT, 12))
def test_what_attention_sends_is_worked_out(world, words):
    for counted, _ in explained(world, words):
        assert any(axis.startswith("cp") for axis, _ in counted)


@pytest.mark.parametrize("words", sampled(PIPELINES, 12))
def test_the_messages_are_worked_out(world, words):
    results = [counted for counted, _ in explained(world, words)]
    assert all(("pp", "all_gather") in counted for counted in results)
    sent, taken = (
        sum(counted.get((axis, verb), (0, 0))[0] for counted in results
            for axis in ("pp", "pp_back"))
        for verb in ("send", "receive")
    )  # fmt: skip
    config = config_of(words)
    build = schedule_of(config, batch_size.micro_batches(config, 0))
    p = config.parallel
    replicas = p.tensor_model_parallel_size * p.data_parallel_size
    once = build.stages - 1 - build.v_shape  # the turn of a V stays on its rank
    assert sent == taken == 2 * build.micro_batches * once * replicas
    ends = [counted for counted in results if ("embd", "all_gather") in counted]
    assert len(ends) == (2 * replicas if "--tied" in words and not build.v_shape else 0)


def test_a_reader_follows_a_message(world):
    """An activation from the F that makes it to the F that waits for it, and its gradient back."""
    text = explained(world, "--pp 2")[0][1]
    overview, first, second = re.split(
        r"=== pipeline rank \d.*=\n", text.partition("=== the wh")[0]
    )
    assert "pipeline rank 0: embedding + layer 0\n" in overview
    assert "  0  F0 F1 .  .  B0 W0 .  B1 W1\n  1  .  F0 B0 W0 F1 B1 W1 .  .\n" in overview
    side_by_side = ["F0 > 1 0 > F0", "F1 > 1 BW0 > 0", "1 > BW0 0 > F1", "1 > BW1 BW1 > 0"]
    assert [" ".join(line.split()) for line in overview.splitlines()[-6:-2]] == side_by_side

    lines = first.splitlines()
    send = line_of("mpu/pipeline/engine.py", "self.send_queue.put(send(")
    (at,) = (i for i, x in enumerate(lines) if "stage 0's activation 0  send" in x)
    assert "pp to rank 1 " in lines[at] and "[16, 2, 64]" in lines[at] and "8,192" in lines[at]
    assert lines[at].endswith(send) and "needs add of layers.0 (model/" in lines[at + 1]
    assert lines[at + 2].endswith("the rank continues with F chunk 0 micro-batch 1")
    assert "--- F chunk 0 micro-batch 0 in stage 0 of iteration 1 -" in lines[at - 3]
    (at,) = (i for i, x in enumerate(lines) if "stage 1's gradient 0    receive" in x)
    assert "pp_back from rank 1 " in lines[at]
    assert "the input of BW chunk 0 micro-batch 0, which waits for it at mpu/" in lines[at + 1]
    assert lines[at + 1].endswith("hidden under: F chunk 0 micro-batch 1")
    assert "BW chunk 0 micro-batch 1 in stage 0 of iteration 1: no communication" in first

    lines = second.splitlines()
    (at,) = (i for i, x in enumerate(lines) if "stage 0's activation 0  receive" in x)
    assert "F chunk 0 micro-batch 0 in stage 1" in lines[at - 3]
    assert lines[at + 1].endswith("nothing runs meanwhile")


@pytest.mark.prove
def test_deferred_weight_gradients_are_told_apart(world):
    text = explained(world, "--pp 2 --tp 2 --schedule zb-h1 --tied")[0][1]
    assert re.search(r"\d  wgrad     layers\.0\.mlp\.down +all_gather +tp of 2", text)
    assert re.search(r"needs stage 1's gradient 0, message \d+", text)
    assert re.search(r"grad sum  bucket \d +reduce_scatter embd of 2", text)
    assert "--- W chunk 0 micro-batch 1 in stage 0" in text


def test_lists_stand_side_by_side_as_far_as_they_fit():
    lists = [["a", "b"], ["c"], ["d", "e"]]
    assert columns(lists, ["one", "two", "six"], width=14) == [
        "  one    two", "", "  a      c", "  b", "", "  six", "", "  d", "  e", ""
    ]  # fmt: skip


def test_a_reader_finds_the_gather(world):
    text = explained(world, "--tp 2")[0][1]
    gather = line_of("mpu/layers/linear.py", "= method.start_all_gather(operand, layer.on_f")
    lines = text.splitlines()
    (at,) = (i for i, x in enumerate(lines) if "forward   layers.0.attention.qkv" in x)
    assert "all_gather" in lines[at] and lines[at].endswith(gather)
    assert "[8, 2, 64] -> [16, 2, 64]" in lines[at] and "async" in lines[at]
    assert "of layers.0.attention_norm (mpu/layers/fused.py:" in lines[at + 1]
    assert "nothing ran meanwhile" in lines[at + 2]

    again = line_of("mpu/layers/linear.py", "again = method.start_all_gather_overlapped(x, l")
    (at,) = (i for i, x in enumerate(lines) if "backward  layers.1.mlp.gate_up" in x and again in x)
    assert "async" in lines[at]
    waited = line_of("mpu/layers/linear.py", "layer.wgrad(gathering.gathered(), dy_operand, which)")
    assert f"waited for at {waited}" in lines[at + 2]
    assert lines[at + 2].endswith("hidden under: dgrad matmul of layers.1.mlp.gate_up")
    assert "reduce_scatter" in lines[at + 3] and "backward" in lines[at + 3]
    assert lines[at + 5].endswith("hidden under: wgrad matmul of layers.1.mlp.gate_up")


def test_a_reader_sees_what_hides_the_rows_of_experts(world):
    """The shared expert on the way there; in backward it, and the experts' weight gradients."""
    words = "--dp 2 --num-experts 4 --ep 2 --dispatcher alltoall --shared-expert"
    lines = explained(world, words)[0][1].splitlines()
    ways = [(x, lines[i + 2]) for i, x in enumerate(lines) if "all_to_all" in x and "async" in x]
    there = [told for x, told in ways if "forward   layers.1.mlp" in x]
    back = [told for x, told in ways if "backward  layers.1.mlp" in x]
    assert there[0].endswith("mlp.shared.gate_up and matmul of layers.1.mlp.shared.down")
    assert "hidden under 5 matmuls, wgrad matmul of layers.1.mlp" in back[0]


def test_each_flag_of_a_run_is_obeyed(world):
    """Also by a name with _, where it turns off what is on here, and of a model's file."""
    words = f"--model-file {ROOT / 'tests/tools/value_residual.py'} --square-loss 0.5 --layers 3"
    assert config_of(words).extra == (("square_loss", 0.5),)
    words += " --use_distributed_optimizer --overlap_grad_reduce false --dp 2"
    text = explained(world, words)[0][1]
    assert "ZeRO stage 1" in text and "layers of the model 3" in text
    assert text.index("--- the gradient sums") < text.index("grad sum  bucket 0")


def test_phases_and_buckets(world):
    text = explained(world, f"--tp 2 --dp 2 {FULL}")[0][1]
    assert re.search(r"recompute layers\.1\.mlp\.gate_up +all_gather", text)
    assert re.search(r"backward  embedding +all_gather .*embedding\.py:\d+ \(backward\)", text)
    assert re.search(r"grad sum  bucket 0 +reduce_scatter dp_cp of 2 .* async +mpu/zero", text)
    assert re.search(r"norm      optimizer +all_gather +tp of 2", text)
    summed = text[text.index("backward  layers.1.attention.proj") :]  # of stream and branch
    needs = r"^.*\n +needs dgrad RMSNorm of layers\.1\.mlp_norm \(mpu/layers/fused"
    assert re.search(needs, summed)
    assert "needs segment_reduce of gradient norm (mpu/zero/norm" in text  # and not of a layer
    assert "needs empty" not in text  # compiled code wrote what was allocated
    backward = text.index("--- BW chunk 0 micro-batch 0 ")
    assert backward < text.index("grad sum  bucket 0") < text.index("--- the gradient sums")


def test_the_documents_name_what_exists():
    text = DOCUMENT.read_text() + PIPELINE.read_text()
    places = re.findall(
        r"[(|;] ?((?:mpu|training|pretrain)\S*\.py)[,` |]+((?:`[\w.]+`[, ]*)+)", text
    )
    assert len(places) > 12
    for file, names in places:
        source = (ROOT / file).read_text()
        for name in re.findall(r"[\w.]+", names):
            for part in filter(None, name.split(".")):
                assert re.search(rf"(def|class) {part}\b|    {part}:", source), (file, name)


def test_the_document_tells_what_the_schedules_cost():
    """The last columns of the table of schedules, against the simulator and the plan."""
    lines = PIPELINE.read_text().splitlines()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines if "](schedules/" in line]
    row_of = {re.sub(r"\[(.+)\].*", r"\1", row[0]): row for row in rows if len(row) == 8}
    assert tuple(row_of) == NAMES
    for name, (_, v, *_, share, held, messages) in row_of.items():
        schedule = build(name, 4, 8, int(v))
        one = [1 / int(v)] * schedule.stages
        ran = simulate(schedule, Costs(one, one, one))
        assert share == f"{100 * ran.bubble / ran.step:.1f} %"
        assert float(held) == max(ran.peak) / int(v)
        sends = [step.sends for steps in plan(schedule) for step in steps if step.sends]
        assert int(messages) == len(sends)


def test_a_difference_is_said():
    row = Traffic("tp", "all_gather", "layers.*.mlp.gate_up", "forward", 2, 64, 96, 4)
    lines = sums({("tp", "all_gather"): (3, 96)}, [row])
    assert "DIFFERS: the recording has 2 and 96 bytes" in lines[3]
    assert lines[4].split() == "forward layers.*.mlp.gate_up 2 of 64 bytes, 96 sent".split()
    assert lines[-1] == "DIFFERENT: tp all_gather"


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--pp 2 --schedule interleaved --micro-batches 3", "leave a last group of 1"),
        ("--schedule zb-v", "virtual stages need a pipeline"),
        ("--tp 0", "--tensor-model-parallel-size 0: must be a whole"),
        ("--device cuda", "--device is cpu here"),
        ("--micro-batches 2 --global-batch-size 4", "--micro-batches gives --global-batch-size"),
        ("--optimzer muon", "did you mean --optimizer"),
        ("--tp 8 --dp 2 --pp 2", "is 32 processes on this machine, and at most 16"),
    ],
)
def test_what_a_user_is_told(capsys, argv, said):
    assert main(argv.split()) == 2
    assert said in capsys.readouterr().err


def run_timeline(comm):
    found = explain(*step_of(comm, "--tp 2 --dp 2"))
    return found.text, found.streams


def test_the_timeline_of_the_document_is_what_is_drawn_now(world, tmp_path):
    """`make explain TP=2 DP=2 TIMELINE=docs/timeline.svg` writes it again."""
    (text, streams), *_ = world(4).run(run_timeline)
    draw_timeline(text, streams, tmp_path / "timeline.svg")
    assert shapes(tmp_path / "timeline.svg") == shapes(DOCUMENT.with_name("timeline.svg"))
    drawn = (tmp_path / "timeline.svg").read_text()
    for words in ("compute", "tp", "dp_cp", "world", "gate_up", "layers.1", "bucket 2", "waits",
                  "F micro-batch 0", "BW micro-batch 0, continued", "gradient sums"):  # fmt: skip
        assert f">{words}<" in drawn, words


def test_a_timeline_is_drawn_where_it_may_be(tmp_path, capsys):
    mine = tmp_path / "mine.svg"
    mine.write_text("<svg>drawn by somebody</svg>")
    for path, said in ((mine, "nothing else is replaced"), (tmp_path / "a.pdf", "a .png or .svg")):
        assert main(["--tp", "2", "--timeline", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert mine.read_text() == "<svg>drawn by somebody</svg>"


@pytest.mark.prove
def test_the_command_draws(capsys, tmp_path):
    assert main(["--dp", "2", "--zero", "3", "--timeline", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out.endswith(f"All equal.\n\ndrawn: {tmp_path / 'a.svg'}\n")
    assert len(shapes(tmp_path / "a.svg")) > 100


@pytest.mark.prove
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(waiting, "AFTER", 0.05)
    assert main(["--dp", "2", "--layers", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("All equal.\n")
    first, *_ = said.err.splitlines()  # a session's fork server has torch already
    doing = "importing torch|connecting|running the step"
    assert re.fullmatch(rf"one step on 2 rank\(s\): 0 s, ({doing})", first)


@pytest.mark.prove
def test_the_command_for_a_pipeline(capsys):
    assert main(["--pp", "2", "--schedule", "zb-v", "--tied"]) == 0
    assert capsys.readouterr().out.endswith("All equal.\n")


def test_one_rank_sends_nothing():
    found = explain(config_of("--layers 1"), Grid())
    assert found.counted == found.stated == {}
    assert found.text.endswith("One rank: every collective is the identity, and nothing is sent.")


@pytest.mark.prove
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_the_ranks_import_torch_is_one_line():
    """Before, their forkserver printed a traceback."""
    command = [sys.executable, "tools/explain.py", "--tp", "2"]
    run = subprocess.Popen(
        command, cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")

    def imports() -> bool:
        """Return whether the forkserver has begun to import torch: its library is mapped."""
        maps = [Path(f"/proc/{child}/maps") for child in children.read_text().split()]
        return any("libtorch" in each.read_text() for each in maps)

    while run.poll() is None and not imports():
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    assert (run.returncode, said) == (-signal.SIGINT, "explain.py: stopped by Ctrl-C\n")
