# SPDX-License-Identifier: Apache-2.0
"""README: short, its links lead somewhere, its commands parse, and its blocks run as pasted.

The blocks are taken from README.md itself. They find the text and the model that they name, both
small; fewer iterations stand where they have 500 or 1000, and `make train` is given ITERS=20.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.llama import LlamaConfig
from model.load import load_model_file
from tools import quickstart
from training.flags.megatron import known_flags
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/data/README.md"]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]


def blocks(kind: str = "sh") -> list[str]:
    """Return the fenced blocks of README of this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Return the words of each command in the blocks, without comments and here-documents."""
    text = "".join(blocks()).replace("\\\n", " ")
    text = re.sub(r"<<'EOF'\n.*?^EOF$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in found if words]


def test_the_first_block_has_six_commands():
    # clone, cd, setup, activate, train, generate
    assert len([line for line in blocks()[0].splitlines() if line]) == 6


MEASURED = re.compile(  # a number with a unit of a measurement, or that is exact
    r"\d[\d,.]*(?: %| tokens/s| times| GB| M parameters| nats| bits| minutes| steps| lines)"
    r"|\d+(?:\.\d+)?e-\d+|\d+\.\d{2,}"
)


def test_each_number_has_its_command_commit_machine_and_date():
    """docs/performance.md lists what README measures, in README's words."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition("## The numbers of the README\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows[1:]]
    readme = " ".join(re.sub(r"^```\w*\n.*?^```$", "", README, flags=re.M | re.S).split())
    listed = [words for row in rows for words in row[0].split("; ")]
    assert [words for words in listed if words not in readme] == []
    versions = r"((Python|torch|Status\.\*\*) |==)[\d.]+( to [\d.]+)?"
    numbers = MEASURED.findall(re.sub(versions, "", readme))
    assert [n for n in numbers if not any(n in words for words in listed)] == []
    assert len(numbers) > 20
    makefile = (ROOT / "Makefile").read_text()
    for words, command, commit, machine, date in rows:
        if "its own" in commit:
            continue  # another program's
        for each in re.findall(r"`(.*?)`", command):
            verb, name, *_ = each.split()
            found = f"\n{name}:" in makefile if verb == "make" else "/" in each
            assert found, f"{words}: {each}"
        assert re.fullmatch(r"[0-9a-f]{8}", commit), words
        assert machine in ("EPYC", "Xeon", "H200", "any"), words
        assert re.fullmatch(r"2026-\d\d-\d\d", date), words


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """Files exist, and where a heading is named, the page has it."""
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in slugs, f"{name} links to {target}"


OURS = "mpu|model|estimate|training|tools|benchmarks|tests|csrc|examples"
NOT_OURS = {"training/training.py", "training/argument_utils.py"}  # Megatron-LM's: docs/megatron.md
PLACEHOLDERS = {"mpu/optim/NAME.py"}
GONE = {
    f"tools/{name}.py"
    for name in ("supervise", "ledger", "coordinate_check", "plot_experts", "probe_topology")
}  # in CHANGELOG.md


@pytest.mark.parametrize("name", PAGES)
def test_files_that_pages_name_exist(name):
    """A path that begins with a folder of ours is a file of this repository."""
    text = re.sub(r"https?://\S+", "", (ROOT / name).read_text())
    paths = set(re.findall(rf"(?<![\w./-])(?:{OURS})/[\w./-]*\.\w+", text))
    missing = {path for path in paths if not (ROOT / path).exists()}
    missing -= NOT_OURS | PLACEHOLDERS | GONE
    assert not missing, f"{name} names {missing}"


def test_every_page_is_reached_from_the_list_of_questions():
    listed = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name}" in listed, page.name


def test_every_command_names_files_targets_and_flags_that_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tools").rglob("*.py"))
    trainer = known_flags()
    makefile = (ROOT / "Makefile").read_text()
    seen = set()
    for words in commands():
        seen.add(words[0])
        for word in words:
            if re.fullmatch(r"(tools|examples|model)/[\w/.]+|pretrain_llama\.py", word):
                assert (ROOT / word).is_file(), word
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, words
            (known,) = re.findall(rf"^takes\.{words[1]} +:= (.*)$", makefile, re.M) or [""]
            assert {word.partition("=")[0] for word in words[2:]} <= set(known.split())
            continue
        program = next((w for w in words if w.endswith((".py", ".sh", ".slurm"))), "")
        flags = [w for w in words if w.startswith("--")]
        if words[0] == "torchrun":
            flags = [w for w in words[words.index(program) :] if w.startswith("--")]
        if program.startswith("tools/"):
            missing = [flag for flag in flags if f'"{flag}"' not in sources]
        else:
            missing = [flag for flag in flags if flag not in trainer]
        assert not missing, f"{program} has no {missing}"
    assert {"make", "source", "python", "torchrun", "patch"} <= seen


def test_git_passes_over_what_the_commands_make():
    made = {"my_text/a.txt"}
    for words in commands():
        made |= {word for word in words if word.startswith(("data/", "runs/", "my_model"))}
        made |= {f"{word}/config.json" for word in words if word.startswith("Llama-")}
    assert len(made) > 8
    done = subprocess.run(
        ["git", "check-ignore", *sorted(made)], cwd=ROOT, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == made, made - set(done.stdout.split())
    tracked = ["tests/data/tokenizer", "training/data/gpt.py", "model/llama.py"]
    assert subprocess.run(["git", "check-ignore", *tracked], cwd=ROOT).returncode == 1


def test_a_text_of_ones_own_has_the_recipe_of_make_train(monkeypatch):
    """Every setting is the same but the paths."""
    ran = []
    monkeypatch.setattr(quickstart, "run", lambda command, *how, **more: ran.append(command))
    (pretrain,) = (w for w in commands() if "pretrain_llama.py" in w and "--seq-length" in w
                   and "--num-layers" in w)  # fmt: skip
    folder = Path("runs/quickstart")
    flags = quickstart.flags_of(folder, folder / "tp2", 1000, 1000)
    quickstart.launch(flags, 2, 1)
    settings = []
    for words in (pretrain, ran[0]):
        words = words[words.index("pretrain_llama.py") + 1 :]
        files = "--train-data-path", "--valid-data-path", "--tokenizer-type", "--tokenizer-model"
        for flag in files:  # they are not there
            at = words.index(flag)
            words = words[:at] + words[at + 2 :]
        words += ["--mock-data", "--vocab-size", "2048"]
        settings.append(json.loads(parse(words, 2).canonical_json()))
    readme, ours = settings
    differ = {key for key in readme.keys() | ours.keys() if readme.get(key) != ours.get(key)}
    paths = {"checkpoint.save", "checkpoint.load", "log.log_json", "log.tensorboard_dir"}
    assert differ <= paths | {"checkpoint.save_interval"}


def patched(model: list[str], patch: str) -> list[str]:
    """Return the lines of a model after a patch, whose hunks are where it says."""
    _, *hunks = re.split(r"^@@ -(\d+).*\n", patch, flags=re.MULTILINE)
    for start, hunk in reversed(list(zip(map(int, hunks[::2]), hunks[1::2], strict=True))):
        old, new = ([x[1:] for x in hunk.splitlines() if x[0] in signs] for signs in (" -", " +"))
        assert model[start - 1 : start - 1 + len(old)] == old
        model = [*model[: start - 1], *new, *model[start - 1 + len(old) :]]
    return model


def test_the_diffs_are_of_the_models_file():
    """The second is of the file that the first one made."""
    model = (ROOT / "model" / "llama.py").read_text().splitlines()
    changes, wrong = re.findall(r"<<'EOF'\n(.*?)^EOF$", README, re.MULTILINE | re.DOTALL)
    assert "gelu(gate)" in "\n".join(patched(model, changes))
    assert "y.norm(" in "\n".join(patched(patched(model, changes), wrong))


def test_the_changed_model_reads_what_it_writes_and_no_silu(tmp_path):
    """Multipliers make a Granite of it, and a Mistral is a Llama: both keep its own rule."""
    model = (ROOT / "model" / "llama.py").read_text().splitlines()
    changes, _ = re.findall(r"<<'EOF'\n(.*?)^EOF$", README, re.MULTILINE | re.DOTALL)
    path = tmp_path / "my_model.py"
    path.write_text("\n".join(patched(model, changes)))
    file = load_model_file(str(path))
    hf = file.hf_config(LlamaConfig(260, 32, 64, 2, 4, 2))
    for more in ({}, {"model_type": "granite", "embedding_multiplier": 1.5},
                 {"model_type": "mistral", "sliding_window": None}):  # fmt: skip
        read = file.from_hf_config({**hf, **more})
        assert read.embedding_mult == more.get("embedding_multiplier", 1.0)
        with pytest.raises(ValueError, match="hidden_act is 'silu'"):
            file.from_hf_config({**hf, **more, "hidden_act": "silu"})


def tiny_model(folder: Path) -> None:
    """Write a small Llama as transformers saves one, with a tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    shutil.copytree(ROOT / "tests" / "data" / "tokenizer", folder, dirs_exist_ok=True)


@pytest.mark.prove
def test_the_blocks_run_as_pasted_in_a_fresh_clone(tmp_path):
    """One shell, block after block. The new .venv sees this interpreter's torch."""
    clone = tmp_path / "weft"
    texts = tmp_path / "my_text"
    texts.mkdir()
    for page in sorted((ROOT / "docs").glob("*.md")):
        shutil.copy(page, texts / f"{page.stem}.txt")
    tiny_model(tmp_path / "Llama-3.2-1B")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "SLURM_"))}
    make = {"MAKEFLAGS": f" -- PYTHON={sys.executable}"}
    script = "set -euo pipefail\n" + "\n".join(blocks())
    script, count = re.subn(r"^git clone URL\b", f"git clone -q {ROOT}", script, flags=re.MULTILINE)
    assert count == 1
    script = script.replace("\ncd weft\n", "\ncd weft; mv ../my_text ../Llama-3.2-1B .\n")
    script = re.sub(r"^make train\b", "make train ITERS=20", script, flags=re.MULTILINE)
    script = re.sub(r"^make fork-check .*wrong.*", r"! \g<0>", script, flags=re.MULTILINE)
    script, count = re.subn(r"--train-iters (500|1000) ", "--train-iters 4 ", script)
    assert count == 2
    script = re.sub(r"--(eval-interval|lr-warmup-iters) \d+ ", r"--\1 2 ", script)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=kept | make,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for made in ("runs/mine-hf/config.json", "runs/further/latest", "my_model.py"):
        assert (clone / made).is_file(), made
    assert re.search(r"all \d+ layouts agree", done.stdout)
    caught(done.stdout)
    assert done.stdout.count("bits a byte of held-out text") == 2, "make train, and on my_text"
    evaluated = re.findall(r"^validation at iteration 4 .* bits per byte$", done.stdout, re.M)
    assert len(evaluated) == 4, "by make train, on my_text too, by hand, and from Hugging Face"
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True)
    assert status.stdout == b""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(clone / "runs" / "mine-hf")
    assert model.config.num_hidden_layers == 4


@pytest.mark.prove
def test_the_lines_of_explain_are_real():
    """Numbers of lines move with every change; the rest must be what is printed."""
    words = [sys.executable, "tools/explain.py", "--tp", "2", "--dp", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (shown,) = blocks("text")

    def bare(text: str) -> list[str]:
        return [re.sub(r"\.py:\d+", ".py", line) for line in text.splitlines() if line.strip()]

    printed = bare(done.stdout)
    at = printed.index(bare(shown)[0])
    assert printed[at : at + len(bare(shown))] == bare(shown)
    assert len(bare(shown)) == 10


def caught(said: str) -> None:
    """Compare what fork-check prints with README's words; a float's last digits may be others."""
    (shown,) = re.findall(r"^    tp 2: .*\n(?:    .*\n)+", README, re.M)

    def bare(text: str) -> str:
        return re.sub(r"(\d+\.\d\d)\d*", r"\1", " ".join(text.split()))

    assert bare(shown) in bare(said)


@pytest.mark.prove
def test_the_catch_of_a_wrong_model_is_real(tmp_path):
    """Follow the page: both copies, both patches, and the check that the page names."""
    script = "".join(block for block in blocks() if "<<'EOF'" in block)
    script = re.sub(r"\b(my_model(_wrong)?\.py)", rf"{tmp_path}/\1", script)
    script, count = re.subn(
        r"^make fork-check MODEL=(\S+)(?: ONLY=(\".*\"))?$",
        lambda found: f"{sys.executable} tools/fork_check.py --model {found[1]} --only {found[2]}"
        if found[2] else "", script, flags=re.MULTILINE,
    )  # fmt: skip
    assert count == 2
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{script}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    caught(done.stdout.replace(f"{tmp_path}/", ""))
