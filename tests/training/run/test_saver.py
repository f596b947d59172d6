# SPDX-License-Identifier: Apache-2.0
"""What a run checks in a checkpoint before it resumes, and what it does when a save fails.

Each test runs the program itself: one process, a few steps.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from model.llama import LlamaConfig, hf_config
from mpu.grid import Grid
from tests.sampling import sampled
from training.checkpoint.manifest import PLAIN, plain_name, self_digest, step_name
from training.data.indexed import IndexedWriter, token_dtype

SIZES = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16".split()
FLAGS = """
    --mock-data --vocab-size 100 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --log-interval 1 --device cpu --num-workers 0
""".split()
writing = sys.modules["training.checkpoint.save"]


def run(tmp_path: Path, more: str, code: int = 0, sizes: list[str] = SIZES) -> list[float]:
    """Run; return its losses."""
    log = tmp_path / "log.json"
    log.unlink(missing_ok=True)
    words = more.format(tmp=tmp_path).split()
    mine = [w for w in words if w.startswith("--")]
    flags = [*sizes, *FLAGS]
    for flag in mine:  # a flag of a test's own replaces the common one
        if flag in flags:
            del flags[flags.index(flag) : flags.index(flag) + 2]
    assert pretrain_llama.main([*flags, "--log-json", str(log), *words]) == code
    rows = log.read_text().splitlines() if log.exists() else []
    return [json.loads(row)["loss"] for row in rows]


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run of three steps, saved."""
    run(tmp_path, "--train-iters 3 --save {tmp}/saved")
    return tmp_path


def test_a_start_clears_what_a_killed_removal_left(begun: Path) -> None:
    left = begun / "saved/step_00000002.trash-ab"
    shutil.copytree(begun / "saved" / step_name(3), left)
    assert run(begun, "--train-iters 3 --load {tmp}/saved --save {tmp}/saved") == []
    assert not left.exists()


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (folder / "saved").glob("step_????????"))


@pytest.mark.parametrize("left", ["step_00000004.tmp-ab", "step_00000004"])
def test_a_restart_makes_the_room_that_its_saves_would(
    begun: Path, left: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A killed save, or that of a signal, which prunes nothing, fills a disk of two checkpoints."""
    saved = begun / "saved"

    def used() -> int:
        return sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())

    size, usage = used(), shutil.disk_usage(begun)
    if left.endswith("ab"):
        shutil.copytree(saved / step_name(3), saved / left)
    else:
        run(begun, "--train-iters 4 --save {tmp}/saved --load {tmp}/saved")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=2 * size + size // 2 - used())
    )
    words = "--train-iters 5 --save {tmp}/saved --load {tmp}/saved"
    if not left.endswith("ab"):  # without --keep-last-k both stay
        assert run(begun, words, code=2) == [] and steps(begun) == [3, 4]
        assert "a checkpoint needs" in capsys.readouterr().err
    run(begun, f"{words} --keep-last-k 1")
    assert steps(begun) == [5] and not (saved / "step_00000004.tmp-ab").exists()


@pytest.mark.parametrize(
    ("flags", "word", "told"),
    [
        ("--seed 5", "seed", "was made with --seed 1234 and this run has 5"),
        ("--eod-mask-loss", "data", "was made with --eod-mask-loss False and this run has True"),
    ],
)
def test_another_run_is_refused_by_name_and_allowed_by_name(
    begun: Path, capsys: Any, flags: str, word: str, told: str
) -> None:
    words = f"--train-iters 5 --load {begun}/saved {flags}"
    assert run(begun, words, code=2) == []
    said = capsys.readouterr().err
    assert told in said and f"--allow-change {word}" in said and "step_00000003" in said
    assert len(run(begun, f"{words} --allow-change {word}")) == 2
    assert f"{told}" in (out := capsys.readouterr().out) and "as --allow-change allows" in out
    assert len(run(begun, f"{words} --finetune")) == 5  # begins afresh: nothing to compare


def corpus(prefix: Path, first: int) -> str:
    with IndexedWriter(str(prefix), token_dtype(100)) as writer:
        for i in range(20):
            writer.add([(first + i + j) % 100 for j in range(30)])
    return str(prefix)


def test_another_corpus_or_blend_is_refused(tmp_path: Path, capsys: Any) -> None:
    a, b = corpus(tmp_path / "a", 1), corpus(tmp_path / "b", 2)
    data = "--tokenizer-type NullTokenizer --split 1,0,0 --data-path"

    def go(more: str, code: int = 0) -> str:
        flags = [f for f in FLAGS if f != "--mock-data"]
        words = [*SIZES, *flags, *more.split()]
        assert pretrain_llama.main(words) == code
        said = capsys.readouterr()
        return said.out + said.err

    go(f"--train-iters 2 {data} 0.5 {a} 0.5 {b} --save {tmp_path}/saved")
    load = f"--train-iters 3 --load {tmp_path}/saved"
    go(f"{load} {data} 0.5 {a} 0.5 {b}")
    for other in (f"0.4 {a} 0.6 {b}", f"0.5 {b} 0.5 {a}", f"{a}"):
        output = go(f"{load} {data} {other}", 2)
        assert "other data or another blend of it (--data-path, --split, --data-order)" in output
        assert "--allow-change data" in output
    os.rename(a + ".bin", tmp_path / "c.bin")  # the same data elsewhere is the same data
    os.rename(a + ".idx", tmp_path / "c.idx")
    go(f"{load} {data} 0.5 {tmp_path}/c 0.5 {b}")
    go(f"{load} {data} 0.4 {tmp_path}/c 0.6 {b} --allow-change data tokenizer")


@pytest.mark.parametrize("more", sampled(["", "--finetune", "pretrained"], 3))
def test_a_longer_sequence_with_other_rotary_positions(begun: Path, capsys: Any, more: str) -> None:
    """Refused until --allow-change says rope (and data, which the length belongs to, at a resume);
    one line tells both.
    """
    flags = f"--load {begun}/saved {more}"
    if more == "pretrained":
        flags = f"--load {begun}/none --pretrained-checkpoint {begun}/saved"
    longer = "--seq-length 32 --max-position-embeddings 32 --rotary-base 500000 --use-rope-scaling"
    words = f"--train-iters 5 {flags} {longer}"
    assert run(begun, words, code=2) == []
    assert "--allow-change rope allows it" in capsys.readouterr().err
    assert len(run(begun, f"{words} --allow-change rope data")) == (5 if more else 2)
    said = capsys.readouterr().out
    assert "no effect" not in said
    assert (
        "was trained with --rotary-base 10000, no --use-rope-scaling, --seq-length 16; continuing "
        "with --rotary-base 500000, --rope-scaling-factor 8, --seq-length 32, as --allow-change"
    ) in said


def test_a_word_that_allow_change_does_not_know(begun: Path, capsys: Any) -> None:
    run(begun, "--train-iters 5 --load {tmp}/saved --allow-change order", code=2)
    assert "--allow-change order: must be among seed, data, tokenizer" in capsys.readouterr().err


def test_a_directory_with_later_steps_is_not_written_to(begun: Path, capsys: Any) -> None:
    """A resume would take the other run's newest step for this run's."""
    assert run(begun, "--train-iters 5 --save {tmp}/saved", code=2) == []
    errors = capsys.readouterr().err
    assert "this run begins at step 0" in errors and "step_00000003" in errors
    assert "resume from them with --load" in errors
    run(begun, "--train-iters 5 --save {tmp}/saved --load {tmp}/saved --save-interval 1")
    assert steps(begun) == [3, 4, 5]
    assert (
        run(begun, "--train-iters 6 --save {tmp}/saved --load {tmp}/saved --ckpt-step 4", 2) == []
    )
    assert "this run begins at step 4" in capsys.readouterr().err
    # one that is damaged is no later step: the run comes there again
    (shard,) = (begun / "saved" / "step_00000005").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert len(run(begun, "--train-iters 6 --save {tmp}/saved --load {tmp}/saved")) == 2
    assert "step_00000005 is skipped" in capsys.readouterr().out


def fail_saves(monkeypatch: pytest.MonkeyPatch, which: set[int]) -> list[int]:
    """Let the disk be full for some of the saves, counted from 1."""
    inner, count = writing.write_safetensors, []

    def write(path: Path, *args: Any) -> Any:
        count.append(len(count) + 1)
        if count[-1] in which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return inner(path, *args)

    monkeypatch.setattr(writing, "write_safetensors", write)
    return count


@pytest.mark.parametrize("behind", sampled([" --async-save", ""], 2))
def test_a_failed_save_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, behind: str
) -> None:
    count = fail_saves(monkeypatch, {2})
    losses = run(tmp_path, "--train-iters 6 --save-interval 2 --save {tmp}/saved" + behind)
    assert len(losses) == 6 and steps(tmp_path) == [2, 6] and len(count) == 3
    said = capsys.readouterr().out
    assert "step 4 was not saved" in said and "No space left" in said
    assert "training continues" in said
    assert not list((tmp_path / "saved").glob("*.tmp-*"))


@pytest.mark.parametrize("behind", sampled([" --async-save", ""], 2))
def test_a_failed_save_ends_a_run_that_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, behind: str
) -> None:
    fail_saves(monkeypatch, {2})
    more = "--train-iters 40 --save-interval 2 --on-save-failure stop --save {tmp}/saved"
    losses = run(tmp_path, more + behind, code=1)
    assert 4 <= len(losses) < 40
    # the disk has room again: where the run ended is saved, and with --async-save steps that it
    # made before it heard of the failure
    first, *between, last = steps(tmp_path)
    assert (first, last) == (2, len(losses)) and set(between) <= set(range(6, last, 2))
    assert behind or not between
    said = capsys.readouterr()
    assert "step 4 was not saved" in said.err and "training stops" in said.out


def test_the_last_save_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fail_saves(monkeypatch, {2})
    run(tmp_path, "--train-iters 4 --save-interval 2 --save {tmp}/saved --async-save", code=1)
    assert "step 4 was not saved" in capsys.readouterr().err
    assert steps(tmp_path) == [2]


def test_a_tokenizer_of_any_name_is_kept_and_found(tmp_path: Path) -> None:
    """A checkpoint knows plain names only; what cannot be read again must not be written."""
    for name in ("llama 3.model", "_tok.model", "tok+1.model", "state.json", "a.safetensors"):
        kept = plain_name(Path(name), "tokenizer")
        assert PLAIN.fullmatch(kept) and kept not in ("state.json", "index.json", "manifest.json")
        assert not kept.endswith(".safetensors")
    assert plain_name(Path("x/tokenizer.json"), "tokenizer") == "tokenizer.json"


def test_a_step_that_was_skipped_is_not_saved(tmp_path: Path, capsys: Any) -> None:
    """Going on from it would leave its batch out without a word."""
    inner, count = pretrain_llama.Optimizer.step, []

    def step(self: Any, *args: Any) -> Any:
        count.append(1)
        if len(count) == 4:
            self.sink.buckets[0].grad_shard[0] = float("nan")
        return inner(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_llama.Optimizer, "step", step)
        more = "--train-iters 8 --save-interval 2 --save {tmp}/saved --load {tmp}/saved"
        run(tmp_path, more, code=1)
    assert "not finite at iteration 4" in capsys.readouterr().err and steps(tmp_path) == [2]
    assert len(run(tmp_path, more)) == 6


def test_another_batch_ends_after_the_same_samples(tmp_path: Path) -> None:
    def go(size: int, more: str) -> list[int]:
        words = f"--global-batch-size {size} --train-samples 40 {more}"
        run(tmp_path, words + " --save {tmp}/saved --load {tmp}/saved")
        rows = (tmp_path / "log.json").read_text().splitlines()
        return [json.loads(row)["consumed_samples"] for row in rows]

    assert go(4, "--exit-interval 5") == [4, 8, 12, 16, 20]
    assert go(10, "--allow-change batch") == [30, 40]


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "saved" / step_name(step) / "state.json").read_text())


def put_state(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Replace the state as someone does who can also compute hashes and digests."""
    directory, text = folder / "saved" / step_name(step), json.dumps(state).encode()
    (directory / "state.json").write_bytes(text)
    manifest = json.loads((directory / "manifest.json").read_text())
    sha = hashlib.sha256(text).hexdigest()
    manifest["files"]["state.json"] = {"size": len(text), "sha256": sha}
    manifest["digest"] = self_digest(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_tokens_are_counted_by_the_length_they_came_in(begun: Path) -> None:
    more = "--train-iters 5 --seq-length 8 --max-position-embeddings 16 --allow-change data"
    run(begun, more + " --save {tmp}/saved --load {tmp}/saved")
    counts = [
        (s["consumed_samples"], s["consumed_tokens"])
        for s in (state_of(begun, 3), state_of(begun, 5))
    ]
    assert counts == [(12, 12 * 16), (20, 12 * 16 + 8 * 8)]


@pytest.mark.parametrize("lost", sampled(["consumed_samples", "iteration", "optimizer_steps"], 3))
def test_a_state_that_says_not_where_to_go_on_is_passed_over(
    begun: Path, capsys: Any, lost: str
) -> None:
    run(begun, "--train-iters 5 --save {tmp}/saved --load {tmp}/saved")
    put_state(begun, 5, {k: v for k, v in state_of(begun, 5).items() if k != lost})
    assert len(run(begun, "--train-iters 5 --load {tmp}/saved")) == 2
    output = capsys.readouterr().out
    assert "step_00000005 is skipped" in output and f"state.json has no {lost}" in output


@pytest.mark.prove
@pytest.mark.parametrize("more", ["", "--skip-train"])
def test_a_folder_of_exports_is_not_a_run_to_resume(tmp_path: Path, capsys: Any, more: str) -> None:
    run(tmp_path, "--train-iters 2 --save {tmp}/saved --save-hf {tmp}/hf")
    capsys.readouterr()
    folder = tmp_path / "hf"
    export = folder / step_name(2)
    flags = f"--train-iters 3 --eval-iters 1 --eval-interval 2 {more} --load".split()
    assert pretrain_llama.main([*SIZES, *FLAGS, *flags, str(folder)]) == 2
    said = capsys.readouterr()
    assert f"--load: {export} is a Hugging Face directory, which has weights but" in said.err
    assert "move them away" not in said.out + said.err
    for other in ([str(export)], [str(folder), "--finetune"]):  # what the message says
        assert pretrain_llama.main([*SIZES, *FLAGS, *flags, *other]) == 0


def test_a_name_that_leaves_the_checkpoint_is_no_tokenizer(begun: Path, capsys: Any) -> None:
    state = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "../../secret.json"}
    (begun / "secret.json").write_text("{}")
    put_state(begun, 3, state_of(begun, 3) | state)
    run(begun, "--train-iters 5 --use-checkpoint-args --load {tmp}/saved", code=2, sizes=[])
    assert "--tokenizer-model is missing" in capsys.readouterr().err


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A Hugging Face directory of the tests' model, in bf16."""
    from safetensors.torch import save_file

    from model.llama import Llama, hf_names
    from mpu.context import LayerContext
    from mpu.param import unique_parameters
    from training.checkpoint import parameter_pieces

    config = LlamaConfig(100, 32, 64, 1, 2, 2, max_position_embeddings=16, tied=True)
    grid = Grid()
    model = Llama(config, LayerContext(grid, dtype=torch.bfloat16))
    model.initialize(77)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), grid)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(
        {p.name: p.tensor.detach().contiguous() for p in pieces}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(hf_config(config, "bfloat16")))
    return folder


def test_a_hugging_face_directory_is_loaded_as_it_is(
    tmp_path: Path, capsys: Any, foreign: Path
) -> None:
    take = f"--train-iters 2 --use-checkpoint-args --seq-length 16 --load {foreign}"
    direct = run(tmp_path, take, sizes=[])
    said = capsys.readouterr().out
    assert "is a Hugging Face directory: loading its weights, starting at sample 0" in said
    assert direct == run(tmp_path, take.replace("--use-checkpoint-args", "--ffn-hidden-size 64"))
    fresh = run(tmp_path, "--train-iters 2 --ffn-hidden-size 64")
    assert direct[0] != fresh[0], "the weights were taken"
    wider = run(tmp_path, take.replace("--use-checkpoint-args", "--ffn-hidden-size 96"), 2)
    assert wider == []
    assert "intermediate_size is 64 there and 96 here" in capsys.readouterr().err


def test_weights_to_begin_with_while_nothing_is_saved(
    tmp_path: Path, capsys: Any, foreign: Path
) -> None:
    """The same command begins from the foreign weights and, started again, goes on."""
    more = f"--seq-length 16 --use-checkpoint-args --pretrained-checkpoint {foreign} "
    more += "--train-iters 4 --exit-interval 2 --save {tmp}/saved --load {tmp}/saved"
    first = run(tmp_path, more, sizes=[])
    assert "loaded the weights of" in capsys.readouterr().out
    second = run(tmp_path, more, sizes=[])
    assert "at iteration 2, 8 samples consumed" in capsys.readouterr().out
    undisturbed = run(
        tmp_path, more.replace(" --exit-interval 2", "").replace("saved", "other"), sizes=[]
    )
    assert first + second == undisturbed
    run(tmp_path, "--train-iters 2 --pretrained-checkpoint {tmp}/nothing", code=2)
    assert "--pretrained-checkpoint" in capsys.readouterr().err


def test_the_checkpoints_own_sizes(begun: Path, capsys: Any) -> None:
    more = "--train-iters 5 --use-checkpoint-args --load {tmp}/saved"
    assert len(run(begun, more, sizes=[])) == 2
    run(begun, more + " --hidden-size 64", code=2, sizes=[])
    errors = capsys.readouterr().err
    assert "--hidden-size 64 contradicts --use-checkpoint-args" in errors and "has 32" in errors
    run(begun, more.replace("saved", "nothing"), code=2, sizes=[])
    assert "there is no checkpoint to take the arguments from" in capsys.readouterr().err
