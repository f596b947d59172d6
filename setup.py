# SPDX-License-Identifier: Apache-2.0
"""Name the packages and build the native library; everything else is in pyproject.toml.

Weft runs from its checkout, or from anywhere after `pip install -e .` (docs/library.md). A wheel is
refused, because the import name `mpu` also belongs to an unrelated package on PyPI, and pip
overwrites silently.

The native library is one shared object, compiled from every csrc/*.cpp. It has a plain C interface
and is loaded with ctypes. It needs no Python.h and no torch headers, so one file serves every
Python and every torch.
`python setup.py build_native` builds it alone. Without a compiler the reason is printed, and Weft
falls back to PyTorch.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Command, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-Wall", "-Wextra"]
PACKAGES = [
    "forecast",
    "forecast.explainer",
    "forecast.planner",
    "forecast.rehearsal",
    "model",
    "mpu",
    "mpu.comm",
    "mpu.kernels",
    "mpu.layers",
    "mpu.layers.attention",
    "mpu.layers.float8",
    "mpu.optim",
    "mpu.overlap",
    "mpu.pipeline",
    "mpu.zero",
    "training.checkpoint",
    "training.data",
    "training.faults",
    "training.files",
    "training.flags",
    "training.run",
    "training.run.autotune",
    "training.run.watch",
    "training.settings",
]
# tools/ has no __init__.py: its scripts run by their path; installed, they run by python -m, too
TOOLS = find_namespace_packages(str(ROOT), include=["tools", "tools.*"])


def build_native(root: Path = ROOT, compiler: str | None = None) -> str:
    """Compile csrc/*.cpp into build/weft_native.so if a source is newer; return what was done.

    `compiler` is the user's choice (the CXX variable); None takes c++, g++ or clang++.
    """
    sources = sorted((root / "csrc").glob("*.cpp"))
    inputs = [*sources, *sorted((root / "csrc").glob("*.h"))]
    if not sources:
        return "native library: not built, csrc/ holds no .cpp file"
    target = root / "build" / "weft_native.so"
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if target.exists() and target.stat().st_mtime_ns >= newest:
        return "native library: build/weft_native.so is newer than its sources, kept"
    wanted = [compiler] if compiler else ["c++", "g++", "clang++"]
    found = next((path for path in map(shutil.which, wanted) if path), None)
    if found is None:
        return (
            f"native library: not built, no C++ compiler ({', '.join(wanted)}) was found; Weft runs"
            " without it, more slowly. With one (Debian: apt install g++) call make setup again"
        )
    target.parent.mkdir(exist_ok=True)
    # Written aside and renamed: a process that has the old library mapped keeps it.
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        output = Path(aside) / target.name
        objects = [Path(aside) / f"{source.stem}.o" for source in sources]
        commands = [
            [found, *FLAGS, *_openmp(found), "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        # Linked without OpenMP's library: its symbols are found in torch's, so the process has one
        # thread pool.
        commands.append([found, "-shared", "-pthread", *map(str, objects), "-o", str(output)])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                message = done.stderr.strip()
                return f"native library: not built, {found} refused a source:\n{message}"
        output.replace(target)
    return f"native library: built build/weft_native.so from {len(sources)} file(s) with {found}"


def _openmp(compiler: str) -> list[str]:
    """Return GCC's OpenMP flag; clang, whose OpenMP is another library, does without."""
    message = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return [] if "clang" in message else ["-fopenmp"]


class BuildNative(Command):
    """Build the native library alone: python setup.py build_native."""

    description = "compile csrc/*.cpp into build/weft_native.so"
    user_options: list[tuple[str, str, str]] = []

    def initialize_options(self) -> None:
        """Take no options."""

    def finalize_options(self) -> None:
        """Take no options."""

    def run(self) -> None:
        """Build, and print what was done or why not."""
        print(build_native(compiler=os.environ.get("CXX")), flush=True)


class BuildPy(build_py):
    """Build the native library as a part of an editable install."""

    def run(self) -> None:
        """Build the library, then let setuptools do its part."""
        self.run_command("build_native")
        super().run()


class RefuseWheel(bdist_wheel):
    """Refuse to build a wheel."""

    def run(self) -> None:
        """Stop with the reason."""
        raise SystemExit(
            "Weft runs from its checkout (or pip install -e .): a wheel would install the import"
            " name 'mpu', which an unrelated package on PyPI also uses and silently overwrites."
        )


if __name__ == "__main__":
    setup(
        packages=[*PACKAGES, *TOOLS],
        py_modules=["pretrain_llama"],
        package_data={"training.flags": ["megatron.toml"]},
        cmdclass={"build_native": BuildNative, "build_py": BuildPy, "bdist_wheel": RefuseWheel},
    )
