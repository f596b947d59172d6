# SPDX-License-Identifier: Apache-2.0
"""Write another commit of this repository to a folder, ready to run.

Nothing is imported from either tree: a tree is used by its command line.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class NoCheckout(Exception):
    """A commit cannot be checked out or built; the message has the reason."""


def checkout(base: str, folder: Path) -> Path:
    """Write the files of a commit to `folder` and build its native library; return its root.

    base: any name of a commit of this repository, or a directory that holds a checkout already,
    which is then used in place. The files come from `git archive`, so a killed comparison leaves
    nothing in .git. Raises NoCheckout.
    """
    tree = Path(base)
    if (tree / "pretrain_llama.py").exists():
        tree = tree.resolve()
    else:
        words = ["git", "-C", str(ROOT), "archive", "--format=tar", base]
        done = subprocess.run(words, capture_output=True)
        if done.returncode:
            raise NoCheckout(f"{base}: not a commit of {ROOT}: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        tree = folder
    build(tree)
    return tree


def build(tree: Path) -> None:
    """Build a tree's native library if a source is newer.

    Raises NoCheckout if there is none afterwards: the fallbacks are slower and round differently.
    """
    words = [sys.executable, "setup.py", "--quiet", "build_native"]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True)
    if not (tree / "build" / "weft_native.so").exists():
        raise NoCheckout(f"{tree}: no native library was built: {done.stdout}{done.stderr}".strip())


def describe(base: str) -> str:
    """Return a commit's short hash and subject, or the directory that was named instead."""
    if (Path(base) / "pretrain_llama.py").exists():
        return base
    return _git("log", "-1", "--format=%h %s", base)


def describe_here() -> str:
    """Return this checkout's commit, and whether files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return describe("HEAD") + (", with uncommitted changes" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()
