# SPDX-License-Identifier: Apache-2.0
"""Nothing replaces or removes a folder or a file that the same purpose did not write.

Each kind makes a place where a flag names something of somebody else's: a refusal with exit code 2
and one sentence before the first step, or a run that ends well; what is not its own stays to the
byte. After them come the places that are a command's own, where it does replace and remove.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import pretrain_llama
from tests.launcher import Launcher
from tests.sampling import sampled
from tests.unlucky import Case, Kind, check, drawn

ROOT = Path(__file__).resolve().parents[1]
SEED, CASES, EVERY = 49, 48, 6  # of 16 kinds
TINY = """
    pretrain_llama.py --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 1
    --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 --num-workers 0
    --device cpu --lr 1e-2
    --micro-batch-size 1 --global-batch-size 1 --log-interval 1 --save-interval 1
""".split()
Words = list[str | Path]
place: Path  # of the runs that the kinds copy


@pytest.fixture(scope="module", autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a run of two steps with its Hugging Face folders, and another one."""
    global place
    place = tmp_path_factory.mktemp("runs")
    for name in ("own", "other"):
        words = flags(place / name, 2, "--save-hf", place / f"{name}-hf")
        assert pretrain_llama.main([str(word) for word in words[1:]]) == 0
        assert len(os.listdir(place / f"{name}-hf")) == 2
    yield


def flags(save: str | Path, steps: int, *more: str | Path) -> Words:
    return [*TINY, "--train-iters", str(steps), "--save", save, *more]


def begun(folder: Path, name: str = "own") -> tuple[Path, Path]:
    """Copy a run and its Hugging Face folders into a case; their times stay as they were."""
    for each in (name, f"{name}-hf"):
        shutil.copytree(place / each, folder / each)
    return folder / name, folder / f"{name}-hf"


def spelt(rng: random.Random, folder: Path, target: Path) -> str:
    """Return another spelling of a path: relative, through a link, with dots."""
    way = rng.randrange(5)
    if way == 0:
        return os.path.relpath(target, ROOT)
    if way == 1:
        (folder / "a-link").symlink_to(target)
        return f"{folder}/a-link"
    if way == 2:
        (folder / "up").symlink_to(target.parent, target_is_directory=True)
        return f"{folder}/up/{target.name}"
    return (f"{target}/", f"{target.parent}/x/../{target.name}/.")[way - 3]


def notes(path: Path, text: str = "of a person") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def somebodys(rng: random.Random, at: Path) -> list[Path]:
    """Put something of somebody else's at a path; return what must stay as it is."""
    way = rng.randrange(6)
    if way == 0:
        notes(at / "notes.txt")
    elif way == 1:  # made by transformers, or downloaded
        notes(at / "config.json", json.dumps({"model_type": "llama"}))
        (at / "model.safetensors").write_bytes(rng.randbytes(200))
    elif way == 2:
        notes(at.parent / f"of-{at.name}" / "notes.txt")
        at.symlink_to(at.parent / f"of-{at.name}")
        return [at, at.parent / f"of-{at.name}"]
    elif way == 3:
        notes(at, "a file")
    elif way == 4:  # another run's
        shutil.copytree(place / "other-hf" / "step_00000002", at)
    else:
        shutil.copytree(place / "other-hf", at)
    return [at]


# --save-hf


def save_hf_is_a_run(rng: random.Random, folder: Path) -> Case:
    own, _ = begun(folder)
    save, more = [
        (own, ["--load", own]),
        (folder / "new", ["--load", own]),
        (folder / "new", ["--pretrained-checkpoint", own]),
        (folder / "new", ["--branch-from", own, "--load", folder / "new"]),
        (folder / "new", []),
    ][rng.randrange(5)]
    words = flags(save, 4, *more, "--save-hf", spelt(rng, folder, own))
    if rng.random() < 0.5:
        words += ["--save-hf-keep-last-k", "1"]
    return Case(words, says="--save-hf .*(is also the directory of|holds checkpoints)", kept=[own])


def save_hf_is_a_run_to_be(rng: random.Random, folder: Path) -> Case:
    save = folder / "new"
    flag = rng.choice(["--save", "--load"])
    words = flags(save if flag == "--save" else folder / "b", 2, "--save-hf", f"{save}/.")
    if flag == "--load":
        words += ["--load", save]
    return Case(words, says=f"--save-hf .* is also the directory of {flag}", absent=[save])


def a_place_in_a_checkpoint(rng: random.Random, folder: Path) -> Case:
    own, _ = begun(folder)
    inside = own / "step_00000001" / rng.choice(["", "more", "a/b"])
    if rng.random() < 0.5:
        words = flags(folder / "new", 1, "--save-hf", inside)
    else:
        words = flags(inside, 3)
    return Case(words, says="--save(-hf)? .*(is|lies in .* which is) a checkpoint", kept=[own])


def a_place_of_weights(rng: random.Random, folder: Path) -> Case:
    """Hugging Face's weights, and Megatron-LM's checkpoints."""
    theirs = folder / "theirs"
    if rng.random() < 0.5:
        shutil.copytree(place / "other-hf" / "step_00000002", theirs)
        says = "holds a Hugging Face model"
    else:
        notes(theirs / "latest_checkpointed_iteration.txt", "7")
        notes(theirs / "iter_0000007" / "common.pt", "tensors")
        says = "holds a Megatron-LM checkpoint"
    named = spelt(rng, folder, theirs)
    words = flags(folder / "new", 1, "--save-hf", named)
    if rng.random() < 0.5:
        words = flags(named, 1, *(["--load", named] if rng.random() < 0.5 else []))
    return Case(words, says=says, kept=[theirs])


def save_hf_has_anothers_step(rng: random.Random, folder: Path) -> Case:
    """A step that is still to come has somebody else's folder."""
    own, hf = begun(folder)
    kept = somebodys(rng, hf / f"step_{rng.randint(3, 9):08d}")
    words = flags(own, 9, "--load", own, "--save-hf", spelt(rng, folder, hf))
    return Case(words, says="--save-hf .*was not written by this run", kept=[*kept, own])


def two_runs_with_one_save_hf(rng: random.Random, folder: Path) -> Case:
    _, theirs = begun(folder, "other")
    words = flags(folder / "new", rng.randint(1, 3), "--save-hf", theirs)
    words += ["--save-hf-keep-last-k", "1"] * rng.randrange(2)
    return Case(words, says="step_00000001 was not written by this run", kept=[theirs])


def save_hf_was_changed(rng: random.Random, folder: Path) -> Case:
    """A person has put a file into this run's own folder, or another text into one of its files;
    the run goes back to the step before and would write that folder again.
    """
    own, hf = begun(folder)
    shutil.rmtree(own / "step_00000002")
    change = rng.randrange(4)
    if change == 0:
        notes(hf / "step_00000002" / "notes.txt")
    elif change == 1:
        (hf / "step_00000002" / "eval").mkdir()
    elif change == 2:
        weights = hf / "step_00000002" / "model.safetensors"
        before = weights.stat()
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        (hf / "step_00000002" / "config.json").unlink()
    words = flags(own, 3, "--load", own, "--save-hf", hf)
    return Case(words, says="step_00000002 was not written by this run, or was changed", kept=[hf])


def save_hf_keeps_what_is_not_its_own(rng: random.Random, folder: Path) -> Case:
    """Earlier steps that are somebody else's, or changed: nothing is removed but its own."""
    own, hf = begun(folder)
    kept = []
    for name in ("step_00000000", "step_00000001", f".step_00000003.tmp-{'a' * 16}", "step_7"):
        if name == "step_00000001" and rng.random() < 0.5:
            kept.append(notes(hf / name / "notes.txt").parent)
        elif rng.random() < 0.6:
            shutil.rmtree(hf / name, ignore_errors=True)
            kept += somebodys(rng, hf / name)
    words = flags(own, 4, "--load", own, "--save-hf", hf, "--save-hf-keep-last-k", "1")
    return Case(words, codes=(0,), says="step_00000004 for transformers", kept=kept)


# --save


def save_has_anothers_step(rng: random.Random, folder: Path) -> Case:
    own, _ = begun(folder)
    kept = somebodys(rng, own / f"step_{rng.randint(3, 9):08d}")
    words = flags(own, 9, "--load", own)
    says = "--save .*which is not a checkpoint of Weft|--load: .*/step_0000000[3-9]"
    return Case(words, says=says, kept=[*kept, own / "step_00000002"])


def save_has_anothers_file(rng: random.Random, folder: Path) -> Case:
    own, hf = begun(folder)
    name = rng.choice(["lock", "save_hf.json"])
    (own / name).write_text(rng.choice(["my notes", '["a list"]', '{"door": "front"}', "\0\1"]))
    words = flags(own, 3, "--load", own, "--save-hf", hf)
    says = "is not the lock of a run|save_hf.json says what may be replaced, and cannot be read"
    return Case(words, says=says, kept=[own / name, own / "step_00000001", hf])


def pruning_meets_anothers(rng: random.Random, folder: Path) -> Case:
    """--keep-last-k with a person's files in a checkpoint, a copy made by hand, a hand's file."""
    own, _ = begun(folder)
    kept = [own / "step_00000001"]
    way = rng.randrange(4)
    if way == 0:
        notes(kept[0] / "notes.txt")
    elif way == 1:
        (kept[0] / "eval").mkdir()
    elif way == 2:
        shutil.rmtree(kept[0])
        shutil.copytree(own / "step_00000002", kept[0])
    else:
        kept += [notes(own / "latest", "the latest news"), notes(kept[0] / "a.txt")]
    if rng.random() < 0.5:
        words: Words = ["tools/checkpoint.py", "prune", own, "--keep-last-k", "1"]
    else:
        words = flags(own, 3, "--load", own, "--keep-last-k", "1")
    return Case(words, codes=(0,), says="step_00000001 is left in place", kept=kept)


def pruning_meets_another_run(rng: random.Random, folder: Path) -> Case:
    own, _ = begun(folder)
    other, _ = begun(folder, "other")
    shutil.rmtree(other / "step_00000002")
    words = flags(other, 4, "--load", own)
    words += ["--keep-last-k", "1"] if rng.random() < 0.5 else ["--save-retain-interval", "100"]
    return Case(words, says="--save .*checkpoints of another run", kept=[own, other])


# files


def a_log_that_is_none(rng: random.Random, folder: Path) -> Case:
    own, _ = begun(folder)
    log, way = folder / "data", rng.randrange(6)
    if way == 0:
        log = own / "step_00000001" / rng.choice(["state.json", "rank_00000-000.safetensors"])
    elif way == 1:
        log.write_bytes(rng.randbytes(5000))
    elif way == 2:
        notes(log, "the first line\nthe second, without an end")
    elif way == 3:
        notes(log, rng.choice(["[1]\n[2]\n[3", '{"text": "a document"}\n{"text": "anot']))
    elif way == 4:
        log = place / "own-hf" / "step_00000002" / "model.safetensors"
    else:
        notes(log, "no line at all")
    flag = ["--log-json", log]
    if rng.random() < 0.3 and way in (1, 2, 3):
        flag = ["--log-digests", "1"]
        (folder / "new").mkdir()
        log = Path(shutil.move(log, folder / "new" / "digests.jsonl"))
    kept = [log, own]
    return Case(flags(folder / "new", 1, *flag), says="--log-.*not the log of a run", kept=kept)


# tools


def converting_onto_anothers(rng: random.Random, folder: Path) -> Case:
    """convert, consolidate: the folders and files that they name are there already."""
    own, hf = begun(folder)
    there = folder / "there"
    kept = somebodys(rng, there)
    tool = "tools/checkpoint.py"
    way = rng.randrange(6)
    if way == 0:
        target = rng.choice([there, own, own / "step_00000001", hf, Path("/"), Path("/etc")])
        words: Words = [tool, "convert", "--to-hf", target, "--load", own]
    elif way == 1:
        words = [tool, "convert", "--to-hf", own / "step_00000001" / "hf", "--load", own]
    elif way == 2:
        notes(there / "latest_checkpointed_iteration.txt" if there.is_dir() else folder / "m" / "x")
        (folder / "mega").mkdir()
        notes(folder / "mega" / "latest_checkpointed_iteration.txt", "900")
        notes(folder / "mega" / "iter_0000900" / "common.pt")
        kept.append(folder / "mega")
        words = [tool, "convert", "--to-mcore", folder / "mega", "--load", own]
    elif way == 3:
        words = [tool, "convert", "--from-hf", hf / "step_00000002", "--save", own]
    elif way == 4:
        words = [tool, "convert", "--from-hf", hf / "step_00000002", "--save", hf / "step_00000001"]
    else:
        words = [tool, "consolidate", own, "--save", own / "step_00000001"]
    return Case(words, says="--(to-hf|to-mcore|save) ", kept=[*kept, own, hf])


def texts_onto_anothers(rng: random.Random, folder: Path) -> Case:
    """build_corpus, train_tokenizer, preprocess_data: outputs that are somebody else's."""
    text = notes(folder / "text.txt", "".join(f"line {n} of a text\n" for n in range(300)))
    out = folder / "out"
    way = rng.randrange(6)
    if way < 3:
        name = ("train.jsonl", "heldout.jsonl", "corpus.json")[way]
        notes(out / name, '{"text": "of a person"}\n' if way < 2 else '{"a": 1}')
        source: Words = [out / name] if way < 2 and rng.random() < 0.5 else [text]
        words: Words = ["tools/build_corpus.py", "--input", *source, "--output-dir", out]
    elif way == 3:
        notes(out / "tokenizer.model", "\n\x0e\n\x05<unk> of a person")
        words = ["tools/train_tokenizer.py", "--input", text, "--vocab-size", "400"]
        words += ["--output-prefix", out / "tokenizer"]
    else:
        for end in (".bin", ".idx"):
            (out / f"text_text_document{end}").parent.mkdir(exist_ok=True)
            (out / f"text_text_document{end}").write_bytes(rng.randbytes(60))
        (out / f"text.{'0' * 16}.parts").mkdir()
        notes(out / f"text.{'0' * 16}.parts" / "notes.txt")
        words = ["tools/preprocess_data.py", "--input", text, "--output-prefix", out / "text"]
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    return Case(words, codes=(1, 2), says="it exists and is not", kept=[out, text])


def reports_onto_anothers(rng: random.Random, folder: Path) -> Case:
    """Pictures and reports."""
    row = {"iteration": 1, "loss": 2.0, "consumed_samples": 1}
    log = notes(folder / "log.jsonl", json.dumps(row) + "\n")
    way = rng.randrange(4)
    if way == 0:
        there = notes(folder / "picture.png", "a holiday")
        words: Words = ["tools/plot_loss.py", log, "--output", there]
    elif way == 1:
        there = notes(folder / "picture.svg", "<svg>drawn by hand</svg>")
        words = ["tools/draw_schedule.py", "--schedule", "1f1b", "--out", there]
    elif way == 2:
        words = ["tools/bisect_runs.py", folder, folder, "--out", notes(folder / "o" / "a").parent]
        there = folder / "o"
    else:
        there = notes(folder / "report.json", '{"mine": 1}')
        words = flags(folder / "new", 1, "--rehearse", "--rehearse-json", there)
    return Case(words, codes=(1, 2), says="it exists and is not", kept=[there])


KINDS: dict[str, Kind] = {
    made.__name__: made
    for made in (
        save_hf_is_a_run,
        save_hf_is_a_run_to_be,
        a_place_in_a_checkpoint,
        a_place_of_weights,
        save_hf_has_anothers_step,
        two_runs_with_one_save_hf,
        save_hf_was_changed,
        save_hf_keeps_what_is_not_its_own,
        save_has_anothers_step,
        save_has_anothers_file,
        pruning_meets_anothers,
        pruning_meets_another_run,
        a_log_that_is_none,
        converting_onto_anothers,
        texts_onto_anothers,
        reports_onto_anothers,
    )
}


@pytest.mark.parametrize("name, seed", sampled(drawn(KINDS, CASES, SEED), EVERY))
def test_what_is_not_its_own_stays(
    launcher: Launcher, tmp_path: Path, name: str, seed: int
) -> None:
    check(launcher, KINDS[name], seed, tmp_path)


# what is a command's own


def ends_well(launcher: Launcher, words: Words) -> str:
    argv = [str(word) for word in words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = launcher.run(1, [], python=argv, cwd=str(ROOT), env=env)
    assert ended.codes == [0], ended.said(0) + ended.said(0, "out")
    return ended.said(0, "out")


def times(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}


@pytest.mark.prove
def test_a_run_replaces_and_removes_its_own_folders(launcher: Launcher, tmp_path: Path) -> None:
    """Also after they were copied to another disk and their modes were changed; a folder that a
    killed export or removal left goes, too.
    """
    own, hf = begun(tmp_path)
    shutil.rmtree(own / "step_00000002")
    for path in hf.rglob("*"):
        path.chmod(0o755)
    (hf / "step_00000001").rename(hf / f".step_00000001.old-{'b' * 16}")
    before = times(hf / "step_00000002")
    words = flags(own, 4, "--load", own, "--save-hf", hf, "--save-hf-keep-last-k", "2")
    said = ends_well(launcher, words)
    assert said.count(" for transformers") == 4  # of step 1, too, which was not there
    assert sorted(os.listdir(hf)) == ["step_00000003", "step_00000004"]
    assert "step_00000002" in said and before
    again = flags(own, 5, "--load", own, "--save-hf", f"{hf}/../{hf.name}")
    ends_well(launcher, again)
    assert sorted(os.listdir(hf))[-1] == "step_00000005"


@pytest.mark.prove
def test_a_run_replaces_one_folder_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    own, hf = begun(tmp_path)
    shutil.rmtree(own / "step_00000002")
    before = times(hf / "step_00000002")
    ends_well(launcher, flags(own, 2, "--load", own, "--save-hf", hf))
    after = times(hf / "step_00000002")
    assert after.keys() == before.keys() and all(after[name] > before[name] for name in after)
    assert sorted(os.listdir(hf)) == ["step_00000001", "step_00000002"]


@pytest.mark.prove
def test_a_folder_of_its_own_in_save_and_an_empty_one(launcher: Launcher, tmp_path: Path) -> None:
    own, _ = begun(tmp_path)
    (own / "hf" / "step_00000003").mkdir(parents=True)
    (own / "step_00000003").mkdir()  # as a disk that lost its files leaves it
    ends_well(launcher, flags(own, 3, "--load", own, "--save-hf", own / "hf", "--keep-last-k", "1"))
    assert (own / "hf" / "step_00000003" / "config.json").is_file()
    assert [path.name for path in own.glob("step_*")] == ["step_00000003"]


@pytest.mark.prove
def test_tools_replace_their_own_files(launcher: Launcher, tmp_path: Path) -> None:
    own, _ = begun(tmp_path)
    text = notes(tmp_path / "text.txt", "".join(f"line {n} of a text\n" for n in range(300)))
    out, numbers = tmp_path / "out", notes(tmp_path / "numbers.txt", "1 2 3\n4 5 6\n")
    (tmp_path / "hf").mkdir()
    ends_well(
        launcher,
        ["tools/checkpoint.py", "convert", "--to-hf", tmp_path / "hf", "--load", own],
    )
    for step in (1, 2):
        for words in (
            ["tools/build_corpus.py", "--input", text, "--output-dir", out],
            ["tools/train_tokenizer.py", "--input", text, "--vocab-size", "400"]
            + ["--output-prefix", out / "tokenizer"],
            ["tools/preprocess_data.py", "--input", numbers, "--output-prefix", out / "text"]
            + ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"],
            ["tools/draw_schedule.py", "--schedule", "1f1b", "--out", out / "picture.svg"],
            ["tools/checkpoint.py", "convert", "--to-mcore", tmp_path / "mega"]
            + ["--load", own / f"step_{step:08d}"],
        ):
            ends_well(launcher, words)
        numbers.write_text("7 8\n9 10\n")
        notes(text, text.read_text() + "and more\n" * 50)
    assert (tmp_path / "mega" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_corpus_without_a_record_is_not_replaced(launcher: Launcher, tmp_path: Path) -> None:
    numbers = notes(tmp_path / "numbers.txt", "1 2 3\n4 5 6\n")
    words = ["tools/preprocess_data.py", "--input", numbers, "--output-prefix", tmp_path / "text"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    ends_well(launcher, words)
    (tmp_path / "text.written.json").unlink()
    numbers.write_text("7 8\n")
    says = "text_text_document.bin: it exists and is not as this command wrote it"
    kept = [tmp_path / f"text_text_document{end}" for end in (".bin", ".idx")]
    check(launcher, lambda *_: Case(words, codes=(1,), says=says, kept=kept), 0, tmp_path)
