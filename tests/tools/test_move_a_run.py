# SPDX-License-Identifier: Apache-2.0
"""A live run moves from Megatron and back with its optimizer's state, to the bit.

tests/data/megatron_core has saves by megatron-core's own classes (make_megatron_saves.py). Where
megatron-core 0.16.1 is installed it also reads what the tool writes, and trains on.
"""

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import pretrain_llama
from model import llama
from model.llama import LlamaConfig
from mpu.grid import Grid
from tests.launcher import Launcher
from tests.sampling import sampled
from tests.saved import check_equal, stored
from tools.checkpoint import main
from tools.checkpoints.mcore_names import FC2, PROJ, Names, Theirs
from tools.checkpoints.mcore_state import Memory, Weights, pack
from tools.checkpoints.torch_dist import Archive, McoreCheckpoint
from tools.generate import load_model
from training.checkpoint import CheckpointError

DATA = Path(__file__).parent.parent / "data" / "megatron_core"
RUN = Path(__file__).with_name("megatron_core_run.py")
CONFIG = LlamaConfig(64, 16, 24, 2, 4, 2, max_position_embeddings=16)
FORMATS = {
    "tp2_pp2": ("", "fully_reshardable"),
    "old_tp2_dp2": ("",),
}
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def saves(tmp_path_factory: Any) -> Path:
    """The archives' folders, and one with config.json."""
    folder: Path = tmp_path_factory.mktemp("megatron")
    for path in DATA.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder / path.name.partition(".")[0], filter="data")
    (folder / "sizes").mkdir()
    (folder / "sizes" / "config.json").write_text(json.dumps(llama.hf_config(CONFIG)))
    return folder


def convert(saves: Path, source: Path, target: Path, *more: str) -> int:
    sizes = ("--hf-config", str(saves / "sizes"))
    return main(["convert", "--from-mcore", str(source), *sizes, "--save", str(target), *more])


def flags(saves: Path, load: Path) -> str:
    c = CONFIG
    return f"""
        --num-layers {c.num_layers} --hidden-size {c.hidden_size} --vocab-size {c.vocab_size}
        --ffn-hidden-size {c.ffn_hidden_size} --num-attention-heads {c.num_attention_heads}
        --group-query-attention --num-query-groups {c.num_query_groups} --seq-length 16
        --max-position-embeddings 16 --untie-embeddings-and-output-weights --norm-epsilon 1e-5
        --tokenizer-type NullTokenizer --data-path {saves}/plain/text --split 1,0,0 --device cpu
        --data-order megatron --micro-batch-size 2 --global-batch-size 8 --train-iters 40
        --exit-interval 25 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
        --num-workers 0 --log-interval 1 --load {load}
    """


SCHEDULE = "--lr 3e-2 --min-lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 40"


def losses(path: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {str(row["iteration"]): row["loss"] for row in rows}


def apart(here: dict[str, float], run: Path) -> float:
    """Return how far 20 losses are from those of a run of megatron-core."""
    theirs = json.loads(run.read_text())["losses"]
    assert list(here) == [str(i) for i in range(6, 26)]
    return max(abs(here[i] - theirs[i]) for i in here)


@pytest.fixture(scope="module")
def taken(saves: Path, tmp_path_factory: Any) -> Path:
    """The run of one rank, taken over."""
    target: Path = tmp_path_factory.mktemp("taken") / "run"
    assert convert(saves, saves / "plain", target) == 0
    return target


def test_twenty_further_steps_are_megatrons(saves: Path, taken: Path, tmp_path: Path, capsys):
    """Data, weights, moments, step and schedule: the losses that it has without a move."""
    log = ["--log-json", str(tmp_path / "log.jsonl")]
    assert pretrain_llama.main([*flags(saves, taken).split(), *SCHEDULE.split(), *log]) == 0
    assert "at iteration 5, 40 samples consumed" in capsys.readouterr().out
    here = losses(tmp_path / "log.jsonl")
    assert apart(here, saves / "plain" / "run.json") < TOLERANCE
    # without the flags of the schedule, from what the checkpoint has of Megatron's
    own = ["--use-checkpoint-opt-param-scheduler", "--lr", "1", "--exit-interval", "8"]
    log = ["--log-json", str(tmp_path / "again.jsonl")]
    assert pretrain_llama.main([*flags(saves, taken).split(), *own, *log]) == 0
    again = losses(tmp_path / "again.jsonl")
    assert again == {i: here[i] for i in ("6", "7", "8")}


@pytest.mark.prove
@pytest.mark.parametrize("level", [1, 3])
def test_so_are_they_at_tp_2_pp_2(saves: Path, taken: Path, launcher: Launcher, level: int):
    words = f"""{flags(saves, taken)} {SCHEDULE} --zero-stage {level} --sequence-parallel
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"""
    result = launcher.run(4, words.split())
    assert result.codes == [0] * 4, result.said(0)
    here = losses(result.folder / "log.jsonl")
    assert apart(here, saves / "plain" / "run.json") < TOLERANCE


@pytest.mark.parametrize("run", FORMATS)
def test_each_form_of_the_state_gives_the_same_bits(saves: Path, tmp_path: Path, run: str):
    """Of tp 2 x pp 2 and tp 2 x dp 2, in bf16 with masters, the same step in each format."""
    found = []
    for form in FORMATS[run]:
        source, target = saves / run / form, tmp_path / f"{form or 'first'}"
        assert convert(saves, source, target) == 0
        found.append(stored(target / "step_00000005"))
    weights = [name for name in found[0] if name.endswith("weight")]
    assert len(found[0]) == 4 * len(weights)
    for name in weights:
        assert torch.equal(found[0][f"{name}.master"].bfloat16(), found[0][name])
        assert found[0][f"{name}.exp_avg_sq"].min() >= 0
    assert len({tensor.numpy(force=True).tobytes() for name, tensor in found[0].items()
                if name.endswith(".exp_avg")}) == len(weights)  # fmt: skip
    for other in found[1:]:
        check_equal(found[0], other)


def test_moments_lie_with_their_own_weights(saves: Path, taken: Path):
    """Against what megatron-core said of each parameter, where the run was on one rank."""
    said = load_file(saves / "plain" / "dump.safetensors")
    ours = stored(taken / "step_00000005")
    for kind in ("", ".exp_avg", ".exp_avg_sq"):
        qkv = said[f"decoder.layers.1.self_attention.linear_qkv.weight{kind}"]
        rows = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
        for x, blocks in rows.items():
            wanted = torch.cat([qkv[4 * b : 4 * b + 4] for b in blocks])
            assert torch.equal(ours[f"model.layers.1.self_attn.{x}_proj.weight{kind}"], wanted)
        gate, up = said[f"decoder.layers.0.mlp.linear_fc1.weight{kind}"].chunk(2)
        assert torch.equal(ours[f"model.layers.0.mlp.gate_proj.weight{kind}"], gate)
        assert torch.equal(ours[f"model.layers.0.mlp.up_proj.weight{kind}"], up)
        norm = said[f"decoder.layers.1.pre_mlp_layernorm.weight{kind}"]
        assert torch.equal(ours[f"model.layers.1.post_attention_layernorm.weight{kind}"], norm)
        assert torch.equal(ours[f"lm_head.weight{kind}"], said[f"output_layer.weight{kind}"])


@pytest.mark.parametrize("run", ["plain", "tp2_pp2"])
def test_what_is_written_for_megatron_comes_back(saves: Path, tmp_path: Path, capsys, run: str):
    first, out, again = (tmp_path / name for name in ("first", "out", "again"))
    assert convert(saves, saves / run, first) == 0
    assert main(["convert", "--to-mcore", str(out), "--load", str(first)]) == 0
    assert "iteration 5, 40 samples consumed" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        "iter_0000005", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert convert(saves, out, again) == 0
    check_equal(*(stored(place / "step_00000005") for place in (first, again)))
    one, two = (
        json.loads((place / "step_00000005" / "state.json").read_text()) for place in (first, again)
    )
    same = "iteration consumed_samples consumed_tokens optimizer_steps hf_config".split()
    assert {key: one[key] for key in same} == {key: two[key] for key in same}
    assert one["optimizer_steps"] == 5
    assert main(["convert", "--to-mcore", str(out), "--load", str(first)]) == 2
    assert "iter_0000005 exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
         "torch.save wrote only a part of it, and "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", sampled([1, 2, 10_000, 40], 2))
def test_what_is_written_is_complete_or_absent(
    taken, tmp_path, capsys, monkeypatch, at, error, says
):
    """A disk that fills leaves nothing, and what a kill left is cleared away."""
    calls, write = [0], torch.save

    def fails(value: Any, file: Any) -> None:
        calls[0] += 1
        if calls[0] == at or (at == 10_000 and "common.pt" in str(file)):
            raise error
        write(value, file)

    (tmp_path / ".iter_0000005.tmp-0").mkdir()
    monkeypatch.setattr(torch, "save", fails)
    words = ["convert", "--to-mcore", str(tmp_path), "--load", str(taken)]
    assert main(words) == 2
    assert f"it was not written: {says}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(torch, "save", write)
    assert main(words) == 0 and (tmp_path / "iter_0000005" / "metadata.json").is_file()


def test_what_is_written_is_on_the_disk_before_it_has_its_name(taken, tmp_path, monkeypatch):
    synced, fsync = set[int](), os.fsync

    def sync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    assert main(["convert", "--to-mcore", str(tmp_path), "--load", str(taken)]) == 0
    made = tmp_path / "iter_0000005"
    assert [p.name for p in (made, *made.iterdir()) if p.stat().st_ino not in synced] == []


def test_torch_reads_what_is_written(saves: Path, taken: Path, tmp_path: Path):
    """torch.distributed.checkpoint and torch.load, as Megatron calls them."""
    assert main(["convert", "--to-mcore", str(tmp_path), "--load", str(taken)]) == 0
    place, key = tmp_path / "iter_0000005", "decoder.layers.mlp.linear_fc1.weight"
    kinds = ("exp_avg", "exp_avg_sq", "param", "fp32_param")
    names = [key, *(f"optimizer.state.{kind}.{key}" for kind in kinds)]
    state = {name: torch.empty(2, 48, 16) for name in names}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    assert torch.equal(state[key], state[f"optimizer.state.param.{key}"])
    assert torch.equal(state[key], state[f"optimizer.state.fp32_param.{key}"])
    ours = stored(taken / "step_00000005")
    assert torch.equal(state[names[1]][1, 24:], ours["model.layers.1.mlp.up_proj.weight.exp_avg"])
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):  # as megatron/core/safe_globals.py
        common = torch.load(place / "common.pt")
    assert common["opt_param_scheduler"] == {
        "max_lr": 3e-2, "min_lr": 3e-3, "lr_warmup_steps": 16, "num_steps": 40,
        "lr_decay_style": "cosine", "lr_decay_steps": 320, "start_wd": 0.1, "end_wd": 0.1,
        "wd_incr_style": "constant", "wd_incr_steps": 320,
    }  # fmt: skip
    with zipfile.ZipFile(saves / "plain" / "iter_0000005" / "common.pt"):
        theirs = McoreCheckpoint(saves / "plain").common.top.named()["opt_param_scheduler"].named()
    assert common["opt_param_scheduler"] == theirs


def replaced(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a common.pt says."""
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(place / "common.pt")
    change(common)
    torch.save(common, place / "common.pt")


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Rename tensors in .metadata, to names of the same length."""

    def change(place: Path) -> None:
        assert len(old) == len(new)
        data = (place / ".metadata").read_bytes()
        assert old.encode() in data
        (place / ".metadata").write_bytes(data.replace(old.encode(), new.encode()))

    return change


def stepped(value: Any) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        replaced(place, lambda c: c["optimizer"]["state"].update(common_step=value))

    return change


def of_args(**changed: Any) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        replaced(place, lambda c: vars(c["args"]).update(changed))

    return change


@pytest.mark.parametrize(
    "run, change, said",
    sampled([
        ("plain", renamed("state.exp_avg_sq.", "state.max_exp_sq."), "has max_exp_sq: only AdamW"),
        ("plain", renamed("exp_avg.decoder.final", "exp_avg.decoder.fnial"), "final_layernorm.we"),
        ("plain", renamed("optimizer.state.exp_avg", "optimizer.statf.exp_avg"), "is not underst"),
        ("plain", stepped(5.5), "step is [5.5], where one count is expected"),
        ("plain", stepped(None), "the optimizer's step is missing"),
        ("tp2_pp2", of_args(tensor_model_parallel_size=4), "tp 4 x pp 2 x 1 chunks need 8 buff"),
        ("tp2_pp2", of_args(tensor_model_parallel_size=None), "lacks the tensor- and pipeline"),
        ("tp2_pp2", of_args(tensor_model_parallel_size=4, pipeline_model_parallel_size=1),
         "do not fill its buffers"),
        ("tp2_pp2", renamed(".param", ".parma"), "lacks param"),
        ("tp2_pp2/dp_zero_gather_scatter", lambda place: None,
         "save once more with --ckpt-fully-parallel-save"),
    ], 2),
)  # fmt: skip
def test_state_that_cannot_be_told_is_refused(saves, tmp_path, capsys, run, change, said):
    import shutil

    shutil.copytree(saves / run / "iter_0000005", tmp_path / "ckpt")
    change(tmp_path / "ckpt")
    assert convert(saves, tmp_path / "ckpt", tmp_path / "run") == 2
    words = capsys.readouterr().err
    assert said in words and "take the weights alone with --no-load-optim" in words
    assert not (tmp_path / "run" / "step_00000005").exists()
    assert convert(saves, tmp_path / "ckpt", tmp_path / "run", "--no-load-optim") == 0
    assert "moments at 0" in capsys.readouterr().out
    index = json.loads((tmp_path / "run" / "step_00000005" / "index.json").read_text())
    assert all(name.endswith("weight") for name in index)


def test_masters_of_other_weights_are_refused(saves: Path, tmp_path: Path, capsys):
    """What lies in a buffer is held against the weights: layers that change places are seen."""
    import shutil

    place = tmp_path / "ckpt"
    shutil.copytree(saves / "tp2_pp2" / "iter_0000005", place)
    data = (place / ".metadata").read_bytes()
    ranks = [f"dp_group_idx_{i}.gbuf_idx_0" for i in (0, 1)]
    swapped = data.replace(ranks[0].encode(), b"@" * len(ranks[0]))
    swapped = swapped.replace(ranks[1].encode(), ranks[0].encode())
    (place / ".metadata").write_bytes(swapped.replace(b"@" * len(ranks[0]), ranks[1].encode()))
    assert convert(saves, place, tmp_path / "run") == 2
    assert "cannot be assigned to parameters" in capsys.readouterr().err


@pytest.mark.parametrize("fused", [True, False])
def test_the_order_of_a_layers_parameters_is_found(saves: Path, fused: bool):
    """Transformer Engine's layers begin with another one than megatron-core's own."""
    names = Names(llama, CONFIG)
    weights = Weights(McoreCheckpoint(saves / "plain"), names)
    norms = ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]
    proj, qkv, fc1, fc2 = PROJ, "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", FC2
    theirs = [proj, norms[0], qkv, norms[1], fc1, fc2]
    own = [norms[0], proj, qkv, norms[1], fc1, fc2]
    every = [names.theirs("model.embed_tokens.weight")]
    every += [Theirs(n, i, names.inside[n]) for i in (0, 1) for n in (theirs if fused else own)]
    every += [names.theirs("model.norm.weight"), names.theirs("lm_head.weight")]
    memory = torch.zeros(0)
    for each in every[::-1]:
        memory = torch.cat([memory, torch.zeros(-len(memory) % 64), weights.read(each).flatten()])

    def flat(kind: str, bucket: int, first: int, count: int) -> torch.Tensor:
        return memory[first : first + count] + (kind == "exp_avg")

    state = Memory(weights, {(0, 0): [len(memory)]}, {(0, 0): flat})
    for each in every:
        assert torch.equal(state.read(each, "exp_avg"), weights.read(each) + 1)
    memory = memory.flip(0)
    with pytest.raises(CheckpointError, match="cannot be assigned to parameters"):
        Memory(weights, {(0, 0): [len(memory)]}, {(0, 0): flat})


def test_parameters_in_buckets():
    assert pack([10, 64, 3], [64 + 64 + 3]) == [(0, 0), (0, 64), (0, 128)]
    assert pack([10, 64, 3], [64 + 64, 3]) == [(0, 0), (0, 64), (1, 0)]
    assert pack([10, 64], [64, 64]) == [(0, 0), (1, 0)]  # closed before a shared embedding
    assert pack([10, 64], [10, 64]) == [(0, 0), (1, 0)]
    assert pack([10, 64], [11, 64]) is None
    assert pack([10, 64], [64 + 64, 1]) is None
    assert pack([10, 64], [64 + 63]) is None
    assert pack([10], [10, 10]) is None


def test_a_number_of_an_archive_may_be_a_tensor(tmp_path: Path):
    value = {"a": torch.arange(7.0), "b": [torch.tensor(3.0), {"c": torch.arange(4.0)[2]}]}
    place = tmp_path / "x"
    stream = io.BytesIO()
    torch.save(value, stream)
    place.write_bytes(b"before" + stream.getvalue() + b"after")
    archive = Archive(place, 6, len(stream.getvalue()))
    top = archive.top.named()
    assert archive.number(top["b"][0]) == 3.0 and archive.number(top["b"][1].named()["c"]) == 2.0
    with pytest.raises(ValueError, match="does not hold a tensor"):
        archive.number(top["b"])
    with pytest.raises(ValueError, match="where a number is expected"):
        archive.number(top["a"])
    with pytest.raises(ValueError, match="not a sound archive"):
        Archive(place, 6, len(stream.getvalue()) - 40)


@pytest.mark.parametrize(
    "name",
    [
        "tp2_pp2",
        pytest.param("plain", marks=pytest.mark.prove),
        pytest.param("old_tp2_dp2", marks=pytest.mark.prove),
    ],
)
def test_no_damage_is_more_than_a_refusal(saves: Path, tmp_path: Path, name: str):
    """Flipped and cut bytes of common.pt and of the objects: a sentence, or the same result."""
    import random
    import shutil

    place, rng = tmp_path / "ckpt", random.Random(0)
    shutil.copytree(saves / name / "iter_0000005", place)
    files = [p.name for p in place.iterdir() if p.name != "metadata.json"]
    refused = 0
    for i in range(9):
        file = place / files[i % len(files)]
        sound = file.read_bytes()
        bad = bytearray(sound)
        if i % 3:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        else:
            del bad[rng.randrange(len(bad)) :]
        file.write_bytes(bad)
        refused += convert(saves, place, tmp_path / f"run{i}") == 2
        file.write_bytes(sound)
    assert refused > 3


@pytest.mark.prove
@pytest.mark.parametrize("more", [[], ["--format", "fully_reshardable"]])
def test_megatron_core_goes_on_from_what_is_written(
    saves: Path, taken: Path, tmp_path: Path, more: list[str]
):
    """Its model's logits, then 20 steps with its own optimizer, distributed or not."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install psutil megatron-core==0.16.1")
    assert main(["convert", "--to-mcore", str(tmp_path / "out"), "--load", str(taken)]) == 0
    words = ["--data", str(saves / "plain" / "text"), "--load", str(tmp_path / "out"), *more]
    subprocess.run([sys.executable, RUN, str(tmp_path / "run"), *words], check=True)
    model, _ = load_model(str(taken), Grid(), torch.device("cpu"), None)
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).view(16, -1)[:, : CONFIG.vocab_size]
    theirs = load_file(tmp_path / "run" / "logits.safetensors")["logits"].view(16, -1)
    assert theirs.abs().max() > 1 and (logits - theirs).abs().max() < 1e-5
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert apart(said["losses"], saves / "plain" / "run.json") < TOLERANCE


def test_an_export_says_that_factors_stay_behind(saves: Path, taken: Path, tmp_path: Path, capsys):
    here, out = tmp_path / "here", tmp_path / "out"
    words = [*flags(saves, taken).split(), *SCHEDULE.split(), "--save", str(here)]
    words += ["--param-group", "*norm*", "lr-mult=0.5", "--exit-interval", "6"]
    assert pretrain_llama.main(words) == 0
    said = capsys.readouterr().out
    assert "was made without --param-group and this run has --param-group ['*norm* lr" in said
    assert main(["convert", "--to-mcore", str(out), "--load", str(here)]) == 0
    assert "Megatron has no --param-group: there its factors" in capsys.readouterr().err


def test_a_hugging_face_folder_is_written_for_megatron(taken: Path, tmp_path: Path, capsys):
    hf, out = str(tmp_path / "hf"), str(tmp_path / "out")
    assert main(["convert", "--to-hf", hf, "--load", str(taken)]) == 0
    assert main(["convert", "--to-mcore", out, "--load", hf]) == 0
    said = capsys.readouterr()
    assert "no optimizer state: give Megatron --finetune" in said.err
    assert f"-> {out}/iter_0000000; continue in Megatron-LM with --load {out}" in said.out


@pytest.mark.prove
def test_a_run_goes_there_and_back(saves: Path, taken: Path, tmp_path: Path):
    """Five steps of megatron-core, five here, and ten of megatron-core again: its own losses."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install psutil megatron-core==0.16.1")
    here, out = tmp_path / "here", tmp_path / "out"
    words = [*flags(saves, taken).split(), *SCHEDULE.split(), "--save", str(here)]
    assert pretrain_llama.main([*words, "--exit-interval", "10"]) == 0
    assert main(["convert", "--to-mcore", str(out), "--load", str(here)]) == 0
    more = ["--data", str(saves / "plain" / "text"), "--load", str(out), "--more", "10"]
    subprocess.run([sys.executable, RUN, str(tmp_path / "run"), *more], check=True)
    said, wanted = (
        json.loads((place / "run.json").read_text())["losses"]
        for place in (tmp_path / "run", saves / "plain")
    )
    assert list(said) == [str(i) for i in range(11, 21)]
    assert max(abs(said[i] - wanted[i]) for i in said) < TOLERANCE


def test_the_archives_say_who_wrote_them(saves: Path):
    versions = {
        path.parent.name: json.loads(path.read_text())["megatron-core"]
        for path in saves.glob("*/run.json")
    }
    assert versions == {"plain": "0.16.1", "tp2_pp2": "0.16.1", "old_tp2_dp2": "0.12.1"}
