# SPDX-License-Identifier: Apache-2.0
"""Make .venv, with the interpreter's own torch if that is 2.11 or newer, else with torch 2.13.0.

`make setup` runs this with the interpreter that the environment is made from. It needs only the
standard library, and any Python 3 can parse it, to print that it is too old. A stamp in .venv
records what was installed; as long as pyproject.toml and the checkout's path stay the same, nothing
is installed again.
"""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "weft-setup.json")
MARK = "weft-made.txt"  # in .venv: make setup may clear that folder
TORCH = "2.13.0"
TRITON = "triton<3.8"  # tested with this torch
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MINIMUM = (3, 11)
# Prints facts about a Python as JSON, on the last line; torch is not imported, which takes seconds.
PROBE = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("torch")
place = spec.origin if spec else None
version = importlib.metadata.version("torch") if place else None
print(json.dumps([sys.version_info[:2], version, place]))
"""


class SetupError(Exception):
    """Why the environment cannot be made, in one sentence for the person at the terminal."""


def supported(version: "str | None") -> bool:
    """Return whether Weft runs with a version of torch: 2.11, or a newer one (mpu/needs.py)."""
    return version is not None and not module("needs").too_old(version)


def check_interpreter() -> None:
    """Raise SetupError, with a Python that works, on a platform or a Python that is unsupported."""
    if os.name == "nt" or sys.platform in ("cygwin", "msys"):
        raise SetupError("Windows is supported through WSL: run make setup inside a WSL shell")
    if tuple(sys.version_info[:2]) < MINIMUM:
        others = [shutil.which(f"python3.{minor}") for minor in (13, 12, 11)]
        works = [path for path in others if path and probe(path) is not None] + ["..."]
        hint = "install one, then " * (len(works) == 1) + f"make setup PYTHON={works[0]}"
        raise SetupError(
            f"Weft needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer and {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}: {hint}"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        minor = f"python3.{sys.version_info[1]}-venv"
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: its ensurepip module is missing;"
            f" on Debian or Ubuntu: apt install {minor}"
        ) from None
    if sys.platform == "darwin":
        print("macOS: no CUDA and no nccl here; Weft runs on the CPU over gloo", flush=True)


def probe(python: str) -> "list[Any] | None":
    """Return [Python version, torch version, torch file], or None if the interpreter fails."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True)
    except OSError:
        return None
    if done.returncode:
        return None
    return json.loads(done.stdout.decode().splitlines()[-1])


def look(python: str) -> "list[Any]":
    """Probe an interpreter. Raises SetupError if it fails."""
    found = probe(python)
    if found is None:
        raise SetupError(f"{python} does not run")
    return found


def key() -> "dict[str, str]":
    """Return the contents that the stamp must have for the environment to be reused as it is."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return {"pyproject": digest, "root": os.path.realpath(ROOT)}


def read_stamp() -> "dict[str, str]":
    """Return the stamp of .venv, or {} if none can be read."""
    try:
        with open(STAMP, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def module(name: str) -> Any:
    """Import a file of mpu/ that needs no package. Call check_interpreter first."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    return importlib.import_module("mpu." + name)


def has_nvidia_gpu() -> bool:
    """Return whether an NVIDIA driver, or a GPU's device file, is on this machine."""
    return bool(module("driver").found())


def reachable(url: str) -> bool:
    """Return whether an address answers within a few seconds."""
    try:
        with urllib.request.urlopen(url, timeout=4):
            return True
    except (OSError, ValueError):
        return False


def at_work(what: str, state: Any = str) -> Any:
    """Return the context manager of training/run/waiting.py. Call check_interpreter first."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    from training.run.waiting import waiting

    return waiting(what, state)


def pip(*arguments: str) -> None:
    """Run the environment's pip, with its progress on a terminal. Raises SetupError if it fails.

    Elsewhere its newest line is printed at intervals, as it downloads and unpacks for minutes.
    """
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments]
    if sys.stdout.isatty():
        code = subprocess.run(command).returncode
    else:
        newest = [""]
        command += ["--progress-bar", "off"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            with at_work("pip", lambda: newest[0]):
                for line in child.stdout:
                    newest[0] = line.strip()[:120]
        code = child.returncode
    if code:
        raise SetupError("pip failed (see above); the next make setup continues from here")


def clear_venv() -> None:
    """Make .venv an empty folder with our mark. Raises SetupError if make setup did not make it."""
    if os.path.lexists(VENV):
        ours = os.path.isdir(VENV) and (
            not os.listdir(VENV) or any(map(os.path.isfile, (STAMP, os.path.join(VENV, MARK))))
        )
        if not ours:
            raise SetupError(
                ".venv does not work for Weft, and make setup did not make it, so it is not "
                "replaced: move it away, or rm -r .venv to make one for this checkout"
            )
        shutil.rmtree(VENV)
    os.mkdir(VENV)
    with open(os.path.join(VENV, MARK), "w", encoding="utf-8") as file:
        file.write("made by make setup of Weft, which may clear this folder\n")


def make_venv(torch: "list[Any]") -> None:
    """Make .venv; if the interpreter has a torch that Weft can use, make it visible in .venv.

    The interpreter may itself belong to a virtual environment, whose packages
    `--system-site-packages` does not show: then a .pth file names the folder of that torch.
    """
    if os.path.islink(VENV):
        raise SetupError(
            f".venv is a link to {os.path.realpath(VENV)}, which was made for another "
            "pyproject.toml and is not cleared from here: make setup there, or rm .venv to make "
            "one for this checkout"
        )
    inherit = ["--system-site-packages"] if supported(torch[1]) else []
    clear_venv()
    print(f"making .venv from {sys.executable}", flush=True)
    with at_work("making .venv"):
        done = subprocess.run([sys.executable, "-m", "venv", *inherit, VENV])
    if done.returncode:
        raise SetupError(f"{sys.executable} -m venv failed (see above)")
    if inherit and look(PYTHON)[2] != torch[2]:
        import sysconfig

        folder = sysconfig.get_path("purelib", vars={"base": VENV, "platbase": VENV})
        with open(os.path.join(folder, "weft-outer.pth"), "w", encoding="utf-8") as file:
            file.write(os.path.dirname(os.path.dirname(torch[2])) + "\n")
        if look(PYTHON)[2] != torch[2]:
            raise SetupError(f"the new .venv does not see torch {torch[1]} at {torch[2]}")


def torch_for(driver: str) -> "tuple[str, str]":
    """Return the index whose build of torch runs with a driver, and a line about it.

    driver: the version of the machine's NVIDIA driver, "" if there is none or it is unknown. An
    empty index: the build that pip finds by default, PyPI's for CUDA 13.
    """
    known = module("driver")
    if not known.found():
        return CPU_INDEX, f"no NVIDIA GPU here: taking the CPU build of torch {TORCH}"
    least = known.LEAST
    number = int(driver.partition(".")[0]) if driver else least[13]
    if number >= least[13]:
        return "", ""
    if number >= least[12]:
        why = f"driver {driver} is older than {least[13]}, which CUDA 13 needs"
        return known.OLDER, f"{why}: taking the build of torch {TORCH} for CUDA 12"
    return CPU_INDEX, (
        f"driver {driver} is older than {least[12]}, which CUDA 12 needs: taking the CPU build of "
        f"torch {TORCH}; update the driver, rm -r .venv and make setup to use the GPU"
    )


def install_torch() -> None:
    """Install torch, in the build that this machine can run, if its index answers."""
    index, line = torch_for(module("driver").version()) if sys.platform == "linux" else ("", "")
    if index and not reachable(index + "/torch/"):
        why = f"{line}, but {index} does not answer"
        if index != CPU_INDEX or has_nvidia_gpu():
            raise SetupError(
                f"{why}: give an interpreter that has such a torch, make setup PYTHON=..."
            )
        print(f"{why}: taking torch {TORCH} from the index that pip uses", flush=True)
        index = line = ""
    if line:
        print(line, flush=True)
    pip("install", *(["--extra-index-url", index] if index else []), "torch==" + TORCH)


def triton() -> str:
    """Return pip's constraint on Triton: the version that torch installed, or TRITON."""
    ask = "import importlib.metadata; print(importlib.metadata.version('triton'))"
    found = subprocess.run([PYTHON, "-c", ask], capture_output=True).stdout.decode().strip()
    return "triton==" + found if found else TRITON


def say_untested(version: str) -> None:
    """Print a line if a torch is newer than all tested ones; it is used all the same."""
    line = module("needs").untested(version)
    if line:
        print(line, flush=True)


def build_native() -> None:
    """Build the native library. Raises SetupError if that fails."""
    with at_work("compiling the native library"):
        done = subprocess.run([PYTHON, "setup.py", "--quiet", "build_native"], cwd=ROOT)
    if done.returncode:
        raise SetupError("setup.py build_native failed (see above)")


def add_torchrun() -> None:
    """Write .venv/bin/torchrun, which runs tools/torchrun.py.

    An environment that uses the torch of another interpreter has no torchrun of its own, and that
    interpreter's would start ranks that do not see this environment.
    """
    launcher = os.path.join(os.path.dirname(PYTHON), "torchrun")
    script = os.path.join(ROOT, "tools", "torchrun.py")
    text = f'#!/bin/sh\nexec "{PYTHON}" "{script}" "$@"\n'
    if os.path.exists(launcher):
        with open(launcher, encoding="utf-8") as file:
            if file.read() == text:
                return
    with open(launcher, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(launcher, 0o755)


def prepare(chosen: bool) -> None:
    """Make or reuse .venv and install what pyproject.toml asks for."""
    check_interpreter()
    stamp, expected = read_stamp(), key()
    present = probe(PYTHON)
    # The installation, not its executable: python3 and python3.11 are one, a venv's is another.
    here = "Python {}.{} of {}".format(*sys.version_info[:2], sys.prefix)
    if chosen and stamp and present and stamp.get("python") != here:
        raise SetupError(
            f".venv was made from {stamp.get('python')}, not {here}: rm -r .venv to make it again"
        )
    if os.path.islink(VENV) and present and supported(present[1]):
        if stamp.get("pyproject") == expected["pyproject"]:  # from another checkout
            print(f"using .venv, a link to {os.path.realpath(VENV)}, as it is", flush=True)
            build_native()
            return
    moved = bool(stamp) and stamp.get("root") != expected["root"]
    if present is not None and (tuple(present[0]) < MINIMUM or moved):
        present = None  # not usable
    if present and all(stamp.get(name) == value for name, value in expected.items()):
        if supported(present[1]):
            version = ".".join(map(str, present[0]))
            print(f"reusing .venv: Python {version}, torch {present[1]}", flush=True)
            say_untested(present[1])
            build_native()
            add_torchrun()
            return
    if present and present[1] is not None and not supported(present[1]):
        raise SetupError(
            f".venv: {module('needs').too_old(present[1])}: rm -r .venv to make it again"
        )
    if present:
        print("reusing .venv, completing what is in it", flush=True)
        here = stamp.get("python", here)
    else:
        make_venv(look(sys.executable))
        present = look(PYTHON)
    if not supported(present[1]):
        install_torch()
        present = look(PYTHON)
    if not supported(present[1]):
        raise SetupError(f"pip installed torch {present[1]} instead of {TORCH}")
    print(f"torch {present[1]}: {os.path.dirname(present[2])}; installing the rest", flush=True)
    say_untested(present[1])
    constraint = os.path.join(VENV, "weft-constraint.txt")
    with open(constraint, "w", encoding="utf-8") as file:
        file.write(f"torch=={present[1]}\n{triton()}\n")
    pip("install", "-c", constraint, "setuptools>=77.0.3")
    build_native()
    pip("install", "-c", constraint, "--no-build-isolation", "--editable", ROOT + "[dev]")
    add_torchrun()
    with open(STAMP, "w", encoding="utf-8") as file:
        json.dump(dict(expected, python=here, torch=present[1]), file)


def main() -> None:
    """Prepare .venv and the native library; print a failure as one sentence, with exit status 1."""
    if sys.argv[1:] not in ([], ["--chosen"]):
        sys.exit("usage: make setup [PYTHON=/path/to/python3]; it starts tools/setup_env.py itself")
    try:
        prepare(chosen="--chosen" in sys.argv[1:])
    except SetupError as error:
        sys.exit(f"make setup: {error}")
    except KeyboardInterrupt:
        sys.exit("make setup: stopped; the next call continues from here")


if __name__ == "__main__":
    main()
