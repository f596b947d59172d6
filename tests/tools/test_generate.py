# SPDX-License-Identifier: Apache-2.0
"""Sampling: the cache changes nothing, layouts agree, and every rank picks the same token."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.llama import Llama, LlamaConfig, hf_config, hf_names
from model.load import load_model_file
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.sampling import sampled
from tools import generate as module
from tools.checkpoint import main as convert
from tools.generate import Stream, generate, load_model, main, pick, threads_for
from training.checkpoint import find_latest, load, parameter_pieces, save
from training.checkpoint.pieces import state_name, whole
from training.data.tokenizer import NullTokenizer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = LlamaConfig(
    101, 64, 96, 2, 4, 2, init_method_std=0.2, max_position_embeddings=64, rope_scaling_factor=8.0,
    make_vocab_size_divisible_by=16,
)  # fmt: skip
PROMPT = [5, 17, 3, 99, 0, 42]


NUMBERS = {
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "tokenizer_digest": NullTokenizer(101).digest(),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Save a random model with a tokenizer of numbers."""
    return write(tmp_path / "run", NUMBERS)


def write(root: Path, state: dict[str, Any], config: LlamaConfig = CONFIG) -> Path:
    model = Llama(config, LayerContext()).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    save(root, step=1, pieces=pieces, state={"hf_config": hf_config(config), **state}, grid=Grid())
    return root


def test_a_forks_model_has_the_dtype_that_is_stored(tmp_path: Path) -> None:
    """Its tensors have names of their own, and there are moments in float32."""
    file = tmp_path / "neox.py"
    file.write_text(
        "from model.llama import *\nfrom model import llama\n\n\nclass Model(llama.Llama):\n"
        '    hf_ends = {**llama.Llama.hf_ends, "embedding": "gpt_neox.embed_in"}\n'
    )
    neox = load_model_file(str(file))
    model = neox.Model(CONFIG, LayerContext(dtype=torch.bfloat16)).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), neox.hf_names(model), Grid())
    for kind in ("exp_avg", "exp_avg_sq"):
        pieces += [
            whole(state_name(piece.name, kind), piece.tensor.float())
            for piece in pieces
            if piece.tensor.dtype == torch.bfloat16
        ]
    state = {"hf_config": neox.hf_config(CONFIG)}
    save(tmp_path / "run", step=1, pieces=pieces, state=state, grid=Grid())
    found, _ = load_model(str(tmp_path / "run"), Grid(), torch.device("cpu"), None, str(file))
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}


def greedy_by_full_forward(model: Llama, ids: list[int], new: int) -> list[int]:
    ids = list(ids)
    with torch.no_grad():
        for _ in range(new):
            logits = model(torch.tensor([ids]))[-1, 0, : CONFIG.vocab_size]
            ids.append(int(logits.argmax()))
    return ids[-new:]


def test_the_cache_changes_nothing() -> None:
    model = Llama(CONFIG, LayerContext()).initialize(1)
    wanted = greedy_by_full_forward(model, PROMPT, 24)
    assert len(set(wanted)) > 5, "a model that repeats itself would prove little"
    assert generate(model, PROMPT, max_new_tokens=24, temperature=0) == [wanted]
    caches: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        at_once = model(torch.tensor([PROMPT]))
        parts = [
            model.decode(torch.tensor([PROMPT[a:b]]), a, caches)
            for a, b in ((0, 3), (3, 4), (4, 6))
        ]
    assert (torch.cat(parts) - at_once).abs().max() < 1e-5


def greedy_by_transformers(root: Path, folder: Path, ids: list[int], new: int) -> list[int]:
    """Generate as nanoGPT's sample.py does: each token from the last ones that fit, anew."""
    from transformers import LlamaForCausalLM

    convert(["convert", "--to-hf", str(folder), "--load", str(root)])
    model, ids = LlamaForCausalLM.from_pretrained(folder), list(ids)
    with torch.no_grad():
        for _ in range(new):
            last = ids[-CONFIG.max_position_embeddings :]
            ids.append(int(model(torch.tensor([last])).logits[0, -1].argmax()))
    return ids[-new:]


def of_words(checkpoint: Path, folder: Path) -> list[str]:
    """Return flags that continue PROMPT in words, none of which ends the text."""
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    prompt = ["--prompt", " ".join(f"w{i}" for i in PROMPT), "--temperature", "0"]
    where = str(words(folder / "words", CONFIG.vocab_size) / "tokenizer.json")
    return ["--load", str(checkpoint), "--device", "cpu", *kind, where, *prompt]


def test_beyond_the_context_the_last_tokens_are_continued(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = greedy_by_transformers(checkpoint, tmp_path / "hf", PROMPT, 90)
    assert len(set(wanted[60:])) > 5
    capsys.readouterr()
    main([*of_words(checkpoint, tmp_path), "--max-new-tokens", "90"])
    out, err = capsys.readouterr()
    assert [int(word[1:]) for word in out.split()] == PROMPT + wanted
    assert err.count("max_position_embeddings 64") == 1 and err.count("\n") == 2
    long = PROMPT + wanted  # a prompt of 96 tokens
    (row,) = generate(
        load_model(str(checkpoint), Grid(), torch.device("cpu"), None)[0], long,
        max_new_tokens=5, temperature=0,
    )  # fmt: skip
    assert row == greedy_by_transformers(checkpoint, tmp_path / "again", long, 5)


def test_only_whole_characters_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is a byte; a character comes with its last one, and what is none at the end."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    text = "a\u00f1\u20ac\U0001f600b".encode() + b"\xf0\x9f"
    stream = Stream(lambda ids: bytes(ids).decode(errors="replace"))
    parts = []
    for n in range(1, len(text) + 1):
        stream.show(list(text[:n]))
        parts.append(capsys.readouterr().out)
    assert [p for p in parts if p] == ["a", "\u00f1", "\u20ac", "\U0001f600", "b"]
    stream.end(list(text))
    assert capsys.readouterr().out == "\ufffd\n"


def test_a_long_text_is_not_decoded_for_each_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, decoded = [0.0], list[int]()

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        clock[0] += 1.0
        return "x" * len(ids)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stream = Stream(decode)
    for n in range(1, 101):
        clock[0] += 1.0
        stream.show([0] * n)
    stream.end([0] * 100)
    assert len(decoded) <= 7 and capsys.readouterr().out == "x" * 100 + "\n"


@pytest.mark.prove
@pytest.mark.parametrize("end", ["Ctrl-C", "head"])
def test_tokens_are_printed_as_they_come_until_someone_stops_it(
    checkpoint: Path, tmp_path: Path, end: str
) -> None:
    """It would take minutes to its last token; what there is at Ctrl-C is printed whole."""
    command = [sys.executable, "tools/generate.py", *of_words(checkpoint, tmp_path)]
    command += ["--max-new-tokens", "1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:  # fmt: skip
        assert child.stdout is not None and child.stderr is not None
        text = child.stdout.read(400)
        if end == "head":
            child.stdout.close()
            said = child.stderr.read()
        else:
            child.send_signal(signal.SIGINT)
            rest, said = child.communicate(timeout=60)
            text += rest
        code = child.wait(60)
    said = "".join(line for line in said.splitlines(True) if "max_position_embeddings" not in line)
    assert (code, said) == {"Ctrl-C": (130, "generate: stopped by Ctrl-C\n"), "head": (1, "")}[end]
    if end == "Ctrl-C":
        model = Llama(CONFIG, LayerContext()).initialize(1)
        ids = [int(word[1:]) for word in text.split()]
        assert ids[:60] == PROMPT + greedy_by_full_forward(model, PROMPT, 54)
        assert text.endswith("\n")


def sample_in(comm: Any, root: str, temperature: float) -> list[list[int]]:
    grid = comm.grid(comm.size)
    model = Llama(CONFIG, LayerContext(grid, dtype=torch.float32))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(50.0)  # padding rows must not be able to win
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), grid)
    found = find_latest(root, grid, pieces=pieces)
    assert found is not None
    load(found, pieces, grid)
    return generate(
        model,
        PROMPT,
        samples=3,
        max_new_tokens=30,
        temperature=temperature,
        top_k=20,
        top_p=0.9,
        seed=7,
    )


@pytest.mark.parametrize("temperature", sampled([0.8, 0.0], 2))
def test_every_layout_and_every_rank_says_the_same(
    world: Any, checkpoint: Path, temperature: float
) -> None:
    (alone,) = world(1).run(sample_in, str(checkpoint), temperature)
    assert all(0 <= token < CONFIG.vocab_size for row in alone for token in row)
    assert (alone[0] == alone[1]) == (temperature == 0)
    for rows in world(2).run(sample_in, str(checkpoint), temperature):
        assert rows == alone


def test_pick_follows_its_definition() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).expand(20_000, 4)

    def shares(temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
        drawn = pick(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(drawn, minlength=4) / len(logits)

    assert shares(0).tolist() == [0, 1, 0, 0]
    p = logits[0].softmax(-1)
    assert (shares(1.0) - p).abs().max() < 0.015
    assert (shares(2.0) - (logits[0] / 2).softmax(-1)).abs().max() < 0.015
    assert shares(1.0, top_k=1).tolist() == [0, 1, 0, 0]
    two = torch.tensor([0, p[1], p[2], 0]) / (p[1] + p[2])
    assert (shares(1.0, top_k=2) - two).abs().max() < 0.015
    assert (shares(1.0, top_p=float(p[1]) + 0.01) - two).abs().max() < 0.015  # the one that crosses
    assert shares(1.0, top_p=float(p[1]) - 0.01).tolist() == [0, 1, 0, 0]
    assert shares(1.0, top_p=1e-9).tolist() == [0, 1, 0, 0]


def row_of_one_head(comm: Any, root: str) -> list[list[int]]:
    model, _ = load_model(root, comm.grid(comm.size), torch.device("cpu"), None)
    assert model.ctx.grid.tp_kv.size == comm.size
    return generate(model, PROMPT, max_new_tokens=30, temperature=0)


def test_ranks_that_share_a_key_value_head_say_the_same(world: Any, tmp_path: Path) -> None:
    root = write(tmp_path / "run", NUMBERS, replace(CONFIG, num_query_groups=1))
    (alone,) = world(1).run(row_of_one_head, str(root))
    assert len(set(alone[0])) > 5
    assert world(2).run(row_of_one_head, str(root)) == [alone, alone]


def test_a_sample_ends_where_its_document_does() -> None:
    model = Llama(CONFIG, LayerContext()).initialize(1)
    row = generate(model, PROMPT, max_new_tokens=30, temperature=0)[0]
    stop = row[10]
    assert generate(model, PROMPT, max_new_tokens=30, temperature=0, stop=stop) == [
        row[: row.index(stop)]
    ]


def test_from_the_command_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", str(checkpoint), "--prompt", "5 17 3 99 0 42", "--device", "cpu"]
    main([*flags, "--temperature", "0", "--max-new-tokens", "12"])
    said = capsys.readouterr().out.split()
    model = Llama(CONFIG, LayerContext()).initialize(1)
    wanted = PROMPT + greedy_by_full_forward(model, PROMPT, 12)
    assert [int(word) for word in said] == wanted
    texts = []
    for seed in ("1", "1", "2"):
        main([*flags, "--num-samples", "2", "--max-new-tokens", "12", "--seed", seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].splitlines()[::2] == ["--- 1 of 2", "--- 2 of 2"]


@pytest.mark.prove
def test_two_processes_print_what_one_does(checkpoint: Path) -> None:
    flags = [
        "tools/generate.py",
        "--load",
        str(checkpoint),
        "--prompt",
        "5 17 3",
        "--device",
        "cpu",
    ]
    flags += ["--temperature", "0.9", "--max-new-tokens", "20"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            [sys.executable, *before, *flags],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=100,
            check=True,
        ).stdout
        for before in ([], launcher)
    ]
    assert said[0] == said[1] and len(said[0].split()) > 3


@pytest.mark.parametrize(
    ("state", "flags", "sentence"),
    [
        ({}, [], "names no tokenizer: give --tokenizer-type"),
        ({**NUMBERS, "tokenizer_digest": "0"}, [], "its SHA-256 differs"),
        (NUMBERS, ["--prompt", "7 x"], "reads numbers below"),
        ({"hf_config": None}, [], "hf_config must be a dict"),
        (NUMBERS, ["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (NUMBERS, ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v"], "--vocab-file v"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, Any],
    flags: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving = sys.modules["training.checkpoint.save"]
    monkeypatch.setattr(saving, "check_state", lambda state: None)  # as another program saves
    root = write(tmp_path / "run", state)
    asked = [
        "--load",
        str(root),
        "--device",
        "cpu",
        "--max-new-tokens",
        "2",
        "--prompt",
        "1 2 3 4 5",
    ]
    with pytest.raises(SystemExit) as end:
        main([*asked, *flags])
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def words(path: Path, count: int) -> Path:
    """Write a tokenizer.json that knows the words w0, w1, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    model = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    model.pre_tokenizer = Whitespace()
    path.mkdir(exist_ok=True)
    model.save(str(path / "tokenizer.json"))
    return path


def test_an_imported_model_brings_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", {})
    convert(["convert", "--to-hf", str(tmp_path / "hf"), "--load", str(run)])
    words(tmp_path / "hf", CONFIG.vocab_size)
    convert(["convert", "--from-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "again")])
    capsys.readouterr()
    flags = ["--device", "cpu", "--temperature", "0", "--max-new-tokens", "9", "--prompt"]
    main(["--load", str(tmp_path / "again"), *flags, "w5 w17 w3"])
    model = Llama(CONFIG, LayerContext()).initialize(1)
    wanted = [5, 17, 3, *greedy_by_full_forward(model, [5, 17, 3], 9)]
    assert capsys.readouterr().out.split() == [f"w{i}" for i in wanted]
    assert sorted((tmp_path / "again" / "step_00000000").iterdir())[-1].name == "tokenizer.json"

    large = str(words(tmp_path / "large", 200) / "tokenizer.json")
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", large]
    with pytest.raises(SystemExit):
        main(["--load", str(run), *flags, "w5", *kind])
    assert "200 tokens, but the model's vocabulary only 101" in capsys.readouterr().err


def test_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--load", str(tmp_path / "no"), "--device", "cpu"])
    assert end.value.code == 2 and "no checkpoint there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--top-p", "0", " 0.0 must be in (0, 1]"),
        ("--temperature", "-1", ": -1 is not a number of at least 0"),
        ("--temperature", "inf", ": inf is not a number of at least 0"),
        ("--num-samples", "0", ": 0 must be a whole number from 1 to 65536"),
        ("--prompt", "caf\udce9", " is not UTF-8 after 'caf'"),
    ],
)
def test_flags_have_rules(
    flag: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--load", "x", flag, value])
    assert end.value.code == 2 and f"{flag}{rule}" in capsys.readouterr().err


def test_a_small_model_is_decoded_by_one_thread(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread a core and no OMP_NUM_THREADS, threads waited for one another at every op."""
    assert [threads_for(n, 8) for n in (10**6, 10**8, 10**10)] == [1, 3, 8]
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    flags = ["--load", str(checkpoint), "--prompt", "5", "--device", "cpu", "--max-new-tokens", "1"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(flags)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    main(flags)
    assert set_to == [1], "what a person set is kept"


@pytest.mark.parametrize("rank, count, number", [(1, 2, 1), (3, 8, 3), (3, 1, 0)])
def test_a_ranks_gpu_is_the_current_one(
    monkeypatch: Any, rank: int, count: int, number: int
) -> None:
    """Triton launches on the current GPU (runtime/jit.py); where srun hides others it is 0."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: current.append(torch.device(d).index))
    monkeypatch.setattr(module.Launch, "from_env", lambda: module.Launch(rank, 4, rank, 4))
    monkeypatch.setattr(module.Launch, "check_rendezvous", lambda self: None)
    monkeypatch.setattr(module, "meet", lambda *about: None)
    seen = []

    def launched(device: torch.device) -> None:  # as Triton's launcher
        assert device.index == current[-1], "the tensors are on another GPU than the kernel"
        seen.append(device.index)

    monkeypatch.setattr(module.Grid, "connect", lambda self, device, *about: launched(device))
    monkeypatch.setattr(module.Grid, "close", lambda self: None)
    monkeypatch.setattr(module, "run", lambda args, grid, device: launched(device))
    assert main(["--load", "nowhere", "--prompt", "w1"]) == 0
    assert seen == [number, number]


def test_without_a_gpu_its_flag_is_refused_in_a_sentence(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "unusable_gpu", lambda: "")
    with pytest.raises(SystemExit):
        main(["--load", "nowhere", "--prompt", "w1", "--device", "cuda"])
    assert capsys.readouterr().err == (
        "generate: torch sees no CUDA device: use --device cpu\n"
    )


def test_gpus_are_chosen_in_one_place() -> None:
    found = set()
    for room in ("mpu", "model", "training", "tools"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            if "set_device(" in text or "cuda\", launch.local_rank" in text:
                found.add(path.relative_to(ROOT).as_posix())
    assert found - {"forecast/rehearsal/device.py"} == {"mpu/accelerators.py"}
