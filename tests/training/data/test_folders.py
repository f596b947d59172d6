# SPDX-License-Identifier: Apache-2.0
"""Folders as people have them: one walk for folders and patterns, one list of what became of files.

What is right comes from each tree, which says of every file what becomes of it.
"""

import gzip
import os
import random
import re

import pytest

from tools.preprocess_data import preprocess
from training.data.text_files import find_files, stat_files

LINE = b'{"text": "1 2 3"}\n'
ONE_MORE = [0]


def content(name: str) -> bytes:
    """Return another line each time, packed as the name says."""
    ONE_MORE[0] += 1
    line = b'{"text": "%d"}\n' % ONE_MORE[0]
    return gzip.compress(line) if name.lower().endswith(".gz") else line


def make(root, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content(name))


def found(*names: str) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Return the files and {reason: (how many, first)} as the line that is printed says."""
    said: list[str] = []
    files = find_files([str(name) for name in names], report=said.append)
    if files == list(names):
        assert not said
        return files, {}
    (line,) = said
    form = r"--input: (\d+) file\(s\) read(?:, (\d+) left out: (.*))?"
    number, total, each = re.fullmatch(form, line).groups("")
    assert int(number) == len(files) == len(set(files))
    kinds = {
        why: (int(n), at) for n, why, at in re.findall(r"(\d+) ([^(]+) \(first: (.*?)\)", each)
    }
    assert sum(count for count, _ in kinds.values()) == int(total or 0)
    return files, kinds


TREE = {  # what becomes of files: "" is read
    "": "a.jsonl b/c.jsonl b/d/e.txt B.JSONL N.Txt b/x.jsonl.GZ z.jsonl/part-0.jsonl my%20text.txt",
    "hidden": ".hidden.txt ._a.jsonl .ipynb_checkpoints/a-checkpoint.jsonl .git/a.txt .git/HEAD "
    ".cache/huggingface/download/a.jsonl.metadata b/.Trash-1000/files/a.jsonl .Trash/a.jsonl "
    ".Trashes/501/a.jsonl .Spotlight-V100/a.txt .svn/pristine/a.jsonl .dvc/cache/a.jsonl "
    ".snapshot/hourly.0/a.jsonl .DS_Store b/.data.jsonl.Xa3bDf",
    "in a system folder": "__MACOSX/a.jsonl __MACOSX/b/._a.jsonl lost+found/a.jsonl "
    "$RECYCLE.BIN/S-1/$R1.jsonl $Recycle.Bin/a.txt System%20Volume%20Information/a.txt "
    "RECYCLER/a.txt Trash/files/a.txt "
    "PaxHeaders.4711/a.jsonl b/@PaxHeader/a.txt GNUSparseFile.0/a.txt ann/files_trashbin/a.txt "
    "@eaDir/a.jsonl #recycle/a.jsonl FOUND.000/a.txt _temporary/0/part-0.jsonl b/__pycache__/a.txt "
    "_delta_log/0.checkpoint.parquet #snapshot/a.txt",
    "partly downloaded": "p.jsonl.part p.jsonl.gz.crdownload q.jsonl.tmp b/q.jsonl.incomplete "
    "r.txt.partial r.txt.opdownload s.jsonl.download/s.jsonl t.jsonl.filepart u.txt.!qB",
    ".md": "README.md b/notes.md",
    ".db": "Thumbs.db",
    ".ini": "desktop.ini",
    ".bz2": "a.jsonl.bz2 a.txt.bz2",
    ".zip": "all.zip",
    ".gz": "all.tar.gz c.csv.gz",
    "of another kind": "_SUCCESS LICENSE a.jsonl~ b/a.jsonl.1",
    ".json not named itself": "config.json b/d/tokenizer.JSON c.json.gz",
}


def test_what_becomes_of_each_file_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = {
        why: sorted(f"F/{name.replace('%20', ' ')}" for name in names.split())
        for why, names in TREE.items()
    }
    make(tmp_path, *(name for names in wanted.values() for name in names))
    read = wanted.pop("")
    for names in (["F"], ["F/"], ["F/**/*"], ["F/**"], ["F/*"], [f"{tmp_path}/F"], ["*/"], ["?"]):
        files, kinds = found(*names)
        relative = [os.path.relpath(file, tmp_path) for file in files]
        assert relative == read, names
        assert {why: n for why, (n, _) in kinds.items()} == {w: len(f) for w, f in wanted.items()}
        firsts = {why: os.path.relpath(first, tmp_path) for why, (_, first) in kinds.items()}
        assert firsts == {why: names[0] for why, names in wanted.items()}
    everywhere = sum(len(files) for _, _, files in os.walk("F"))
    assert everywhere == len(read) + sum(n for n, _ in kinds.values())
    stat_files(files)
    lines = [name for name in read if name.lower().endswith(".jsonl")]
    assert found("F/**/*.jsonl")[0] == lines
    assert found("F/**/*.jsonl", "F/**/*.txt", "F/**/*.gz")[0] == [
        *lines, *(name for name in read if name.lower().endswith(".txt")), "F/b/x.jsonl.GZ"
    ]  # fmt: skip


def test_what_is_spelt_is_read(tmp_path, monkeypatch):
    """A hidden file or folder, a system's or a .json: where the name or the pattern has it."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path, *(f"F/{at}/a.jsonl" for at in (".git", ".svn", "lost+found", "b")), "F/c.json")
    for name, files in {
        "F/.git": "F/.git/a.jsonl",
        "F/.git/a.jsonl": "F/.git/a.jsonl",
        "F/.*/*.jsonl": "F/.git/a.jsonl F/.svn/a.jsonl",
        "**/.svn/*": "F/.svn/a.jsonl",
        "*/lost+found/*.jsonl": "F/lost+found/a.jsonl",
        "F/*.json": "F/c.json",
        "F/c.json": "F/c.json",
    }.items():
        assert found(name) == (files.split(), {}), name
    files, kinds = found("F", "F/.git", "F/c.json")
    assert files == ["F/b/a.jsonl", "F/.git/a.jsonl", "F/c.json"]
    assert kinds == {
        "hidden": (1, "F/.svn/a.jsonl"), "in a system folder": (1, "F/lost+found/a.jsonl")
    }  # fmt: skip


def reachable(folder: str) -> set[str]:
    """Return the files of text below a folder that no hidden name leads to, by another way."""
    files, folders, new = set(), set(), {os.path.realpath(folder)}
    while new:
        folders |= new
        below = [f"{at}/{name}" for at in new for name in os.listdir(at) if name[0] != "."]
        files |= {os.path.realpath(path) for path in below if path.endswith((".txt", ".JSONL"))}
        new = {os.path.realpath(path) for path in below if os.path.isdir(path)} - folders
    return files


@pytest.mark.parametrize("seed", range(3))
def test_any_links(tmp_path, monkeypatch, seed):
    """Trees drawn at random, with links from anywhere to anywhere in them."""
    draw = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    for tree in map(str, range(12)):
        folders, files = [tree], []
        for i in range(draw.randint(2, 9)):
            folders.append(f"{draw.choice(folders)}/{'.' * (draw.random() < 0.2)}d{i}")
            os.makedirs(folders[-1])
        for i in range(draw.randint(1, 12)):
            files.append(f"{draw.choice(folders)}/{i}{draw.choice(['.txt', '.JSONL', '.md'])}")
            make(tmp_path, files[-1])
        for i in range(draw.randint(1, 9)):
            to = os.path.abspath(draw.choice([*folders, *folders, *files]))
            ending = os.path.splitext(to)[1]
            name = f"{draw.choice(folders)}/{draw.choice('.az')}{i}{ending}"
            os.symlink(to, name) if os.path.isdir(to) or draw.random() < 0.5 else os.link(to, name)
        wanted = {os.stat(file).st_ino for file in reachable(tree)}
        if not wanted:
            continue
        read, kinds = found(tree)
        assert sorted(os.stat(file).st_ino for file in read) == sorted(wanted)
        assert found(f"{tree}/**/*") == (read, kinds) == found(f"{tree}/**")
        by_ending = [
            f"{tree}/**/*{end}" for end in sorted({os.path.splitext(file)[1] for file in read})
        ]
        assert {os.stat(file).st_ino for file in found(*by_ending)[0]} == wanted


def test_the_same_file_by_several_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "F/a.jsonl", "F/b/c.jsonl")
    os.symlink("F", "G")
    both = ["F/a.jsonl", "F/b/c.jsonl"]
    for names, again in {
        ("F", "F"): (1, "F/"),
        ("F", "./F/../F"): (1, "./F/../F/"),
        ("F", "G"): (1, "G/"),
        ("F", "F/b"): (1, "F/b/"),
        ("F", "F/b/c.jsonl"): (1, "F/b/c.jsonl"),
        ("F", "F/**/*.jsonl"): (2, "F/a.jsonl"),
        ("F", f"{tmp_path}/G/*.jsonl"): (1, f"{tmp_path}/G/a.jsonl"),
    }.items():
        assert found(*names) == (both, {"found again": again}), names
    assert found("F/b/c.jsonl", "F")[0] == both[::-1]


@pytest.mark.parametrize("there", range(1, 8))
def test_a_compressed_copy_is_not_read_beside_the_plain_file(tmp_path, there):
    names = [f"a.jsonl{end}" for i, end in enumerate(("", ".gz", ".zst")) if there >> i & 1]
    make(tmp_path, *names, "other/a.jsonl.gz", "a.txt.gz")
    first, *rest = [str(tmp_path / name) for name in names]
    also = [str(tmp_path / "a.txt.gz"), str(tmp_path / "other/a.jsonl.gz")]
    reason = {"compressed beside the plain file": (len(rest), *rest[:1])} if rest else {}
    assert found(tmp_path) == ([first, *also], reason)
    named = found(*map(str, sorted(tmp_path.glob("*.jsonl*"), reverse=True)))
    assert named[0] == [first] and sum(n for n, _ in named[1].values()) == len(rest)


def test_empty_files(tmp_path):
    make(tmp_path, "b.jsonl.gz")
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        (tmp_path / name).write_bytes(b"")
    right = [str(tmp_path / "b.jsonl.gz")], {"empty": (3, str(tmp_path / "a.txt"))}
    assert found(tmp_path) == right  # of b.jsonl gunzip has not written anything yet
    with pytest.raises(ValueError, match="a.txt: no document with text in 1 file"):
        find_files([str(tmp_path / "a.txt")])


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
         "a.jsonl: it only points to the text, which is not here: git lfs pull"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
         "a.parquet: it only points to the text, which is not here: git lfs pull"),
        ("a.txt", b"/annex/objects/SHA256E-s12--4d7a.txt\n", "it only points .* git annex get"),
        ("a.jsonl", LINE, "aria2 has not downloaded all of it: .*a.jsonl.aria2"),
    ],
    ids=["lfs", "lfs parquet", "annex", "aria2"],
)  # fmt: skip
def test_text_that_is_not_here_is_refused(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    (tmp_path / "b.jsonl").write_bytes(LINE)
    if "aria2" in says:
        (tmp_path / f"{name}.aria2").write_bytes(b"\0")
    for where in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=f"--input .*{says}"):
            stat_files(find_files([str(where)]))


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """Its files would be missing without a word. lost+found is the system's, closed to users."""
    make(tmp_path, "F/a.jsonl", "F/private/b.jsonl", "F/lost+found/c.jsonl")
    listdir = os.listdir
    closed: list[str] = []

    def refusing(path):
        if os.path.basename(path) in closed:
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    closed.append("lost+found")
    assert found(tmp_path)[1] == {"in a system folder": (1, f"{tmp_path}/F/lost+found/")}
    closed.append("private")
    for name in (tmp_path / "F", tmp_path / "F/**/*.jsonl"):
        with pytest.raises(ValueError, match="--input .*/private: cannot be read .Permission den"):
            find_files([str(name)])


def test_no_file_of_text_says_what_there_is(tmp_path):
    make(tmp_path, "F/a.md", "F/b.jsonl.bz2", "F/.cache/c.jsonl")
    what = r"1 hidden \(first: .*1 .md \(first: .*F/a.md\), 1 .bz2 \(first: .*F/b.jsonl.bz2\)"
    with pytest.raises(ValueError, match=f"a folder without a file of text, .*left out: {what}"):
        find_files([str(tmp_path / "F")])
    with pytest.raises(ValueError, match="no file of text matches, .*left out: 1 .md"):
        find_files([str(tmp_path / "F/*.md")])


def test_a_pair_beside_its_text(tmp_path):
    """A second run with the same *.json, which matches the records of the first by now."""
    (tmp_path / "a.json").write_text('{"text": "1"}\n')
    for texts in ([str(tmp_path / "*.json")], [str(tmp_path / "*.json")], None):
        texts = texts or sorted(map(str, tmp_path.glob("*.json")))  # as a shell gives them
        said: list[str] = []
        prefix = str(tmp_path / "out")
        (made,) = preprocess(texts, prefix, "NullTokenizer", vocab_size=9, report=said.append)
        assert made.documents == 1
    record = tmp_path / "out.written.json"
    assert f"1 file(s) read, 2 left out: 2 describing a pair (first: {record})" in said[0]
    with pytest.raises(ValueError, match="out.written.json: no document with text in 1 file"):
        find_files([str(record)])


def test_preprocess_says_what_it_reads(tmp_path):
    """Each document is a token: their number is the number of files that are read."""
    make(tmp_path, "F/a.jsonl", "F/b/C.JSONL", "F/.git/a.jsonl", "F/a.jsonl.gz", "F/notes.md")
    os.link(tmp_path / "F/a.jsonl", tmp_path / "F/b/a.jsonl")
    said: list[str] = []
    (made,) = preprocess(
        [str(tmp_path / "F")], str(tmp_path / "out"), "NullTokenizer", vocab_size=1 << 20,
        report=said.append,
    )  # fmt: skip
    assert made.documents == 2 and said[0] == (
        f"--input: 2 file(s) read, 4 left out: 1 hidden (first: {tmp_path}/F/.git/a.jsonl), "
        f"1 found again (first: {tmp_path}/F/b/a.jsonl), 1 .md (first: {tmp_path}/F/notes.md), "
        f"1 compressed beside the plain file (first: {tmp_path}/F/a.jsonl.gz)"
    )
