# SPDX-License-Identifier: Apache-2.0
"""Setting up a checkout: the native library, the refused wheel, the environment's rules, make."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import sampled
from tools import setup_env
from training.run import waiting

ROOT = Path(__file__).parents[1]


def load_setup():
    spec = importlib.util.spec_from_file_location("weft_setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(root, value=7):
    (root / "csrc").mkdir(exist_ok=True)
    (root / "csrc" / "a.cpp").write_text(f'extern "C" int weft_seven() {{ return {value}; }}\n')
    (root / "csrc" / "b.cpp").write_text('extern "C" int weft_eight() { return 8; }\n')


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here"
)


@needs_compiler
def test_every_source_goes_into_one_library_and_only_a_newer_one_builds_it_again(tmp_path):
    build = load_setup().build_native
    sources(tmp_path)
    assert build(tmp_path).startswith("native library: built build/weft_native.so from 2 file(s)")
    library = tmp_path / "build" / "weft_native.so"
    loaded = ctypes.CDLL(str(library))
    assert (loaded.weft_seven(), loaded.weft_eight()) == (7, 8)
    assert list(library.parent.iterdir()) == [library]
    before = library.stat().st_mtime_ns
    assert build(tmp_path).endswith("newer than its sources, kept")
    assert library.stat().st_mtime_ns == before
    os.utime(tmp_path / "csrc" / "b.cpp", ns=(before + 10**9, before + 10**9))
    assert build(tmp_path).startswith("native library: built")


@needs_compiler
def test_a_source_that_does_not_compile_says_why_and_leaves_no_library(tmp_path):
    sources(tmp_path)
    (tmp_path / "csrc" / "a.cpp").write_text("int broken( {\n")
    said = load_setup().build_native(tmp_path)
    assert said.startswith("native library: not built,") and "a.cpp:1" in said
    assert not (tmp_path / "build" / "weft_native.so").exists()


def test_no_compiler_is_a_printed_reason_and_no_failure(tmp_path):
    sources(tmp_path)
    shutil.copy(ROOT / "setup.py", tmp_path)
    with_none = {**os.environ, "CXX": "/nonexistent/c++"}
    command = [sys.executable, "setup.py", "--quiet", "build_native"]
    done = subprocess.run(command, cwd=tmp_path, env=with_none, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "native library: not built, no C++ compiler (/nonexistent/c++)" in done.stdout


def test_a_wheel_is_refused_in_one_sentence(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Weft runs from its checkout" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_package_is_listed():
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("mpu", "model", "training", "forecast")
        for file in (ROOT / top).rglob("*.py")
    }
    script = load_setup()
    assert found == set(script.PACKAGES)
    assert {"tools", "tools.bisect"} <= set(script.TOOLS)


def test_what_the_packages_read_is_shipped_with_them(monkeypatch):
    """What git tracks beside the modules, less the devices of forecasts, which no package holds."""
    from distutils.core import run_setup  # setuptools' own

    from setuptools import Command, Distribution

    monkeypatch.chdir(ROOT)
    made: Distribution = run_setup("setup.py", stop_after="config")
    build: Command = made.get_command_obj("build_py")
    build.ensure_finalized()
    shipped = {f"{folder}/{name}" for _, folder, _, names in build.data_files for name in names}
    assert "training/flags/megatron.toml" in shipped


@pytest.mark.prove
def test_an_editable_install_is_imported_and_run_from_elsewhere(tmp_path):
    """Of a copy of the tracked files, into a folder of its own; no compiler, no network."""
    fork, project = tmp_path / "fork", tmp_path / "project"
    for folder in (fork, project):
        folder.mkdir()
    tar = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(fork)], input=tar.stdout, check=True)
    shutil.copy(ROOT / "setup.py", fork)
    shutil.copy(ROOT / "model" / "llama.py", project / "my_model.py")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    python, (site,) = tmp_path / "venv/bin/python", (tmp_path / "venv").rglob("site-packages")
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "these.pth").write_text("\n".join(here))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    pip += ["--ignore-installed", "--no-build-isolation", "--editable", str(fork)]
    no_compiler = {**os.environ, "CXX": "/nonexistent/c++"}
    subprocess.run(pip, cwd=project, env=no_compiler, check=True, timeout=200)
    look = "import mpu.grid, tools.explain; print(mpu.grid.__file__, tools.explain.__file__)"
    found = subprocess.run([python, "-c", look], cwd=project, capture_output=True, text=True)
    assert found.stdout.split() == [str(fork / "mpu/grid.py"), str(fork / "tools/explain.py")]
    flags = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --lr 1e-3
        --micro-batch-size 1 --mock-data --vocab-size 32 --device cpu --num-workers 0
        --train-iters 1 --model-file my_model.py""".split()
    done = subprocess.run(
        [python, "-m", "pretrain_llama", *flags],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "finished: 1 iterations" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("2.11.0", True),
        ("2.13.1+cpu", True),
        ("2.12.0a0+6bf3f2e", True),
        ("2.10.0", False),
        ("2.9.1", False),
        ("1.13.0", False),
        ("2.14.0", True),
        ("2.15.0+cu132", True),
        ("3.0.0", True),
        ("none", False),
        (None, False),
    ],
)
def test_torch_versions_that_are_kept(version, good):
    """A newer one than all tested ones may be of an image: it is kept, and a line says so."""
    assert setup_env.supported(version) is good


@pytest.mark.parametrize(
    ("version", "warns"),
    [("2.11.0", False), ("2.13.9+cpu", False), ("2.14.0a0+6bf", True), ("2.15.0+cu132", True)],
)
def test_a_newer_torch_is_named_with_the_tested_ones(monkeypatch, capsys, version, warns):
    """By make setup and at the start of a run, which go on."""
    import torch

    from mpu.grid import Grid
    from training.flags.parse import parse
    from training.run import start

    line = f"torch {version} is newer than the versions tested, 2.11 to 2.13"
    setup_env.say_untested(version)
    assert capsys.readouterr().out == f"{line}\n" * warns
    monkeypatch.setattr(torch, "__version__", version)
    flags = """--mock-data --vocab-size 32 --num-layers 1 --hidden-size 32 --num-attention-heads 2
        --seq-length 8 --lr 1e-3 --train-iters 1 --micro-batch-size 1 --device cpu
        --num-workers 0""".split()
    said: list[str] = []
    start.prepare(parse(flags, 1), Grid(), False, said.append)
    assert [text for text in said if "tested" in text] == [line] * warns


def test_the_tested_versions_are_those_of_the_pages():
    """The file that knows them, what make setup installs, and what pip may take."""
    import tomllib

    from mpu import needs

    assert setup_env.TORCH.startswith(f"{needs.NEWEST}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={needs.OLDEST}.0a0" in project["dependencies"]
    for page in ("README.md", "docs/compatibility.md"):
        assert f"torch {needs.OLDEST} to {needs.NEWEST}" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("found", ["3.9.0", ""])
def test_triton_is_the_one_that_torch_brought_or_a_tested_one(monkeypatch, tmp_path, found):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ -n '{found}' ] && echo {found}\n")
    python.chmod(0o755)
    monkeypatch.setattr(setup_env, "PYTHON", str(python))
    assert setup_env.triton() == (f"triton=={found}" if found else setup_env.TRITON)


def test_probe_tells_python_and_torch_without_importing_it():
    import torch

    version, found, place = setup_env.probe(sys.executable)
    assert tuple(version) == sys.version_info[:2]
    assert torch.__version__.startswith(found) and place == torch.__file__  # PyPI has no +cu132
    assert setup_env.probe("/nonexistent/python") is None
    assert setup_env.probe("/bin/false") is None


@pytest.mark.parametrize("terminal", sampled([False, True], 2))
def test_pip_shows_its_progress(monkeypatch, tmp_path, capfd, terminal):
    """Torch is 200 MB, and more with CUDA: minutes without a word looked like a hang."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\necho Downloading torch; sleep 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup_env, "PYTHON", str(python))
    monkeypatch.setattr(waiting, "AFTER", 0.3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    setup_env.pip("install", "torch")
    said = capfd.readouterr()
    if terminal:  # its own bars
        assert said.out.startswith("-m pip ") and "progress-bar" not in said.out
    else:  # its newest line, from time to time
        assert said.out == "" and re.fullmatch(r"(pip: \d+ s, Downloading torch\n)+", said.err)
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(setup_env.SetupError, match=r"pip failed \(see above\)"):
        setup_env.pip("install", "torch")


@pytest.mark.parametrize(
    "driver, found, index, says",
    [
        ("580.65.06", "NVIDIA driver 580.65.06", "", ""),
        ("", "/dev/nvidia0", "", ""),  # its version is not known: what pip finds
        ("570.124.06", "NVIDIA driver 570.124.06", "/cu126", "driver 570.124.06 is older than 580"),
        ("470.82.01", "NVIDIA driver 470.82.01", "/cpu", "older than 525, which CUDA 12 needs"),
        ("", "", "/cpu", "no NVIDIA GPU here: taking the CPU build"),
    ],
)
def test_the_wheel_of_torch_is_one_that_the_driver_runs(monkeypatch, driver, found, index, says):
    monkeypatch.setattr("mpu.driver.version", lambda: driver)
    monkeypatch.setattr("mpu.driver.found", lambda: found)
    address, line = setup_env.torch_for(driver)
    assert address.endswith(index) and bool(address) == bool(index) and says in line
    commands = []
    monkeypatch.setattr(setup_env, "pip", lambda *words: commands.append(words))
    monkeypatch.setattr(setup_env, "reachable", lambda url: True)
    monkeypatch.setattr(setup_env.sys, "platform", "linux")
    setup_env.install_torch()
    extra = ("--extra-index-url", address) if address else ()
    assert commands == [("install", *extra, "torch==2.13.0")]
    monkeypatch.setattr(setup_env, "reachable", lambda url: False)
    if found and index:  # another build would not run here
        with pytest.raises(setup_env.SetupError, match="does not answer"):
            setup_env.install_torch()


def test_an_environment_behind_a_link_is_never_cleared(monkeypatch, tmp_path):
    """Another checkout uses it; `python -m venv --clear` would follow the link."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / ".venv").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    with pytest.raises(setup_env.SetupError, match=f"a link to {tmp_path}/theirs, .* not cleared"):
        setup_env.make_venv([[3, 11], None, None])


def test_an_environment_of_somebody_else_is_never_cleared(monkeypatch, tmp_path):
    """One without a Python that fits was cleared, whoever had made it."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(setup_env, "VENV", str(venv))
    monkeypatch.setattr(setup_env, "STAMP", str(venv / "weft-setup.json"))
    setup_env.clear_venv()
    (venv / "half").write_text("as a stopped set-up leaves it")
    setup_env.clear_venv()
    assert os.listdir(venv) == [setup_env.MARK]
    (venv / setup_env.MARK).rename(venv / "pyvenv.cfg")
    for kind in ("folder", "file"):
        with pytest.raises(setup_env.SetupError, match="make setup did not make it"):
            setup_env.make_venv([[3, 11], None, None])
        assert venv.is_file() or os.listdir(venv) == ["pyvenv.cfg"], kind
        if kind == "folder":
            (venv / "pyvenv.cfg").unlink()
            venv.rmdir()
            venv.write_text("")


def test_the_environment_gets_a_launcher_that_leaves_our_words_last(monkeypatch, tmp_path):
    """README says torchrun; an environment that borrows its torch has none of its own."""
    python = tmp_path / "bin dir" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup_env, "PYTHON", str(python))
    setup_env.add_torchrun()
    launcher = python.with_name("torchrun")
    said = subprocess.run([launcher, "a b", "c"], capture_output=True, text=True).stdout
    assert said == f"{ROOT}/tools/torchrun.py a b c\n"
    launcher.write_text("torch's own")
    setup_env.add_torchrun()
    assert "tools/torchrun.py" in launcher.read_text()


def test_an_old_python_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(setup_env, "MINIMUM", (99, 0))
    with pytest.raises(setup_env.SetupError, match="needs Python 99.0 or newer and .* is 3"):
        setup_env.check_interpreter()


def test_a_python_without_venv_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    package = f"apt install python3.{sys.version_info[1]}-venv"
    with pytest.raises(setup_env.SetupError, match=package):
        setup_env.check_interpreter()


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(setup_env.sys, "platform", "cygwin")
    with pytest.raises(setup_env.SetupError, match="WSL"):
        setup_env.check_interpreter()


def test_an_old_python_can_read_the_script():
    """Python 3.6 is the oldest that a cluster's login node still gives as python3."""
    import ast

    ast.parse((ROOT / "tools" / "setup_env.py").read_text(), feature_version=(3, 6))


def make(*arguments, **environment):
    command = ["make", "--dry-run", *arguments]
    # `make test` runs this: a make inside a make would say which folder it enters
    ours = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**ours, **environment}
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_passes_what_it_is_given_and_nothing_of_the_environment():
    said = make("explain", "TP=2", "ZERO=1").stdout
    assert "tools/explain.py --tp 2" in said and "--zero 1" in said and "--dp" not in said
    said = make("train", "DATA=a.txt b.jsonl", "ITERS=5", TP="4").stdout
    assert "--data 'a.txt b.jsonl'" in said and "--iters 5" in said and "--tp" not in said
    folders = {make("train", f"DATA={name}").stdout.split("--out ")[1].split()[0]
               for name in ("a.txt", "it's b.txt", "a.txt")}  # fmt: skip
    assert len(folders) == 2 and all(re.match(r"runs/quickstart-\d+$", at) for at in folders)
    assert "--out runs/quickstart \n" in make("train").stdout.replace("   ", " ").replace("  ", " ")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain TPP=2", "TPP=2: make explain takes no TPP: it takes ARGS CP CP_COMM "),
        ("train CP=2 TP=2", "CP=2: make train takes no CP: it takes DATA ITERS JSON_KEYS "),
        ("train tp=2", "tp=2: make train takes no tp; did you mean TP?"),
        ("train DATA=", "DATA= is empty: give it a value, or leave it out"),
        ("lint TP=2", "TP=2: make lint takes no TP: it takes PYTHON."),
        ("tp=2", "tp=2: make without a command takes no tp: it takes PYTHON."),
    ],
)
def test_make_refuses_a_variable_that_the_command_does_not_read(words, said):
    """`make explain TPP=2` and `make train CP=2` ran another layout than the one asked for."""
    done = make(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1 and len(done.stderr) < 250
    (name,) = (word for word in words.split()[-1:] if "=" in word)
    assert make("help", **dict([name.split("=")])).returncode == 0, "the environment is no mistake"


def test_make_takes_the_variables_that_each_command_reads():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    takes = {
        name: set(words.replace("$(takes.train)", "").split())
        for name, words in re.findall(r"^takes\.([\w-]+) +:= (.*)$", text, re.MULTILINE)
    }
    quick = "".join(line for line in text.splitlines() if line.startswith(("QUICK", "CORPUS")))
    used = r"call (?:given|flag|whole),(\w+)|\$\((ARGS|ONLY)\)"
    for name in re.search(r"^COMMANDS := (.*)$", text, re.MULTILINE)[1].split():
        recipe = re.search(rf"^{name}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[1]
        if name in ("train", "check-data"):
            recipe += quick + re.search(r"^check-data:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[1]
        read = {a or b for a, b in re.findall(used, recipe)}
        assert read == takes.get("train" if name == "check-data" else name, set()), name


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_alone_lists_every_command():
    command = ["make", "--no-print-directory"]  # which a make above this one would turn on
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    targets = "help setup train test prove chaos rehearse explain fork-check lint bench"
    targets += " bench-overlap bench-context bench-pipeline bench-zero same-bits bench-commit"
    targets += " gpu-check slurm-check"
    assert [line.split()[1] for line in said.splitlines()] == targets.split()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_without_python_is_one_sentence():
    command = ["make", "setup", "PYTHON=/nonexistent/python3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "there is no /nonexistent/python3" in done.stdout


def test_ci_runs_make_test_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


def test_a_linked_environment_of_the_same_packages_is_used_as_it_is(monkeypatch, tmp_path, capsys):
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    for name in ("pip", "make_venv", "add_torchrun"):
        monkeypatch.setattr(setup_env, name, lambda *_: pytest.fail("it is another checkout's"))
    monkeypatch.setattr(setup_env, "build_native", lambda: None)
    monkeypatch.setattr(setup_env, "probe", lambda _: ((3, 11), "2.13.0+cpu", "/x/torch"))
    here = setup_env.key()
    monkeypatch.setattr(setup_env, "read_stamp", lambda: {**here, "root": "/another"})
    setup_env.prepare(chosen=False)
    assert f"a link to {os.path.realpath(ROOT / '.venv')}, as it is" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(setup_env, "read_stamp", lambda: {**here, "pyproject": "", "root": "/a"})
    with pytest.raises(setup_env.SetupError, match="made for another pyproject.toml"):
        setup_env.prepare(chosen=False)
