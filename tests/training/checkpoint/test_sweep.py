# SPDX-License-Identifier: Apache-2.0
"""A sweep over damage to the bytes of a checkpoint: a wrong number is never loaded.

Two ranks save a small Llama with its optimizer's state in several files, twice, with other numbers
each time. After each damage to the newer checkpoint, what is loaded must be one of the two, bit for
bit, and if the newer one is skipped, a line says so. `-m prove -s` takes smaller steps and prints
how many damages were tried.
"""

import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import Llama, LlamaConfig, hf_config, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import draw_normal, unique_parameters
from training.checkpoint import (
    CheckpointError,
    NamedPiece,
    find_latest,
    load,
    parameter_pieces,
    save,
    state_pieces,
)
from training.checkpoint.manifest import self_digest

KINDS = ("master", "exp_avg", "exp_avg_sq")
CONFIG = LlamaConfig(24, 16, 24, 1, 4, 2, make_vocab_size_divisible_by=2)
LATER = pytest.mark.prove


def pieces_of(grid: Grid, seed: int) -> list[NamedPiece]:
    """List weights and optimizer state, drawn from the seed, the same in every layout."""
    model = Llama(CONFIG, LayerContext(grid)).initialize(seed)
    params, names, state = list(unique_parameters(model)), hf_names(model), []
    for i, kind in enumerate(KINDS):
        for name, p in params:
            t = torch.nn.Parameter(torch.empty(p.shape), requires_grad=False)
            t.placement = p.placement  # type: ignore[attr-defined]
            draw_normal(t, names[name], 1.0, seed + 100 * (i + 1))
            state.append((name, kind, 0, t.data.flatten()))
    pieces = parameter_pieces(params, names, grid)
    return pieces + state_pieces(state, params, names, lambda param: grid.dp_cp)


def save_two(comm: Any, root: str) -> None:
    grid = comm.grid(2)
    for step in (1, 2):
        state = {"hf_config": hf_config(CONFIG), "iteration": step, "consumed_samples": 8 * step}
        attach = {"tokenizer.json": b'{"of": %d}' % step}
        pieces = pieces_of(grid, step)
        save(root, step=step, pieces=pieces, state=state, grid=grid, attach=attach, file_bytes=9000)


class Sound:
    """The two checkpoints under `root`: step 1, and step 2, which is damaged and mended."""

    def __init__(self, root: Path) -> None:
        self.root, self.new = root, root / "step_00000002"
        self.files = {p.name: p.read_bytes() for p in sorted(self.new.iterdir())}
        self.old = {p.name: p.read_bytes() for p in sorted((root / "step_00000001").iterdir())}
        self.shards = [name for name in self.files if name.endswith(".safetensors")]
        self.truth = {step: pieces_of(Grid(), step) for step in (1, 2)}
        self.states = {
            step: json.loads(files["state.json"])
            for step, files in ((1, self.old), (2, self.files))
        }
        self.blank = pieces_of(Grid(), 3)
        self.tried, self.refused = {1: 0, 2: 0}, 0
        self.dirty: set[str] = set()

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the newer checkpoint, whatever stands there."""
        (self.new / name).write_bytes(data)
        self.dirty.add(name)

    def mend(self) -> None:
        for path in self.new.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name in self.dirty | (self.files.keys() - {p.name for p in self.new.iterdir()}):
            (self.new / name).write_bytes(self.files[name])
        self.dirty.clear()

    def loaded(self, what: Any) -> int:
        """Load the newest; return its step. Asserts that it is one of the two, to the bit."""
        notes: list[str] = []
        for piece in self.blank:
            piece.tensor.fill_(float("nan"))
        found = find_latest(
            self.root, Grid(), pieces=self.blank, expect=hf_config(CONFIG), note=notes.append
        )
        assert found is not None, what
        load(found, self.blank, Grid())
        assert found.step in self.truth and found.state == self.states[found.step], what
        for piece, true in zip(self.blank, self.truth[found.step], strict=True):
            here, there = piece.tensor.view(torch.uint8), true.tensor.view(torch.uint8)
            assert torch.equal(here, there), (what, piece.name)
        named = [line for line in notes if str(self.new) in line and ": rank 0: " in line]
        assert len(named) == (found.step == 1), (what, notes)
        self.tried[found.step] += 1
        return found.step

    def is_found_out(self, what: Any) -> None:
        """The damage done to the newer one is seen; then it is mended."""
        assert self.loaded(what) == 1, f"silently loaded: {what}"
        self.mend()


@pytest.fixture(scope="module")
def sound(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sound]:
    root = tmp_path_factory.mktemp("sweep")
    world(2).run(save_two, str(root))
    sound = Sound(root)
    assert len(sound.shards) >= 4 and {name[:10] for name in sound.shards} == {
        "rank_00000", "rank_00001"
    }  # fmt: skip
    yield sound
    sound.mend()
    assert sound.loaded("mended") == 2
    print(
        f"\n{sound.tried[1]} damages passed over, {sound.refused} refused, "
        f"{sound.tried[2]} loads equal to the bit"
    )


def boundaries(name: str, data: bytes) -> list[int]:
    """List the offsets at which a file may end: of its header, its tensors, a disk's blocks."""
    cuts = {0, 1, 7, 8, 9, len(data) - 1, *range(512, len(data), 512)}
    if name.endswith(".safetensors"):
        (n,) = struct.unpack("<Q", data[:8])
        cuts.add(8 + n)
        for entry in json.loads(data[8 : 8 + n]).values():
            cuts |= {8 + n + at + more for at in entry["data_offsets"] for more in (-1, 0, 1)}
    return sorted(cut for cut in cuts if 0 <= cut < len(data))


@pytest.mark.parametrize("share", [1601, pytest.param(11, marks=LATER)])
def test_bits_flip(sound: Sound, share: int) -> None:
    """JSON and headers: each 31st bit; tensors: each 241st; or each `share`th of these."""
    if share < 1601:
        assert sum(map(len, sound.files.values())) < 200_000, "the long form would be endless"
    for name in sound.files.keys() - {"tokenizer.json"}:
        good = sound.files[name]
        head = len(good)
        if name.endswith(".safetensors"):
            head = 8 + struct.unpack("<Q", good[:8])[0]
        for bit in (*range(0, 8 * head, 31 * share), *range(8 * head, 8 * len(good), 241 * share)):
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            sound.put(name, data)
            sound.is_found_out((name, bit))


@pytest.mark.parametrize("every", [233, pytest.param(3, marks=LATER)])
def test_files_end_early_or_in_zeros(sound: Sound, every: int) -> None:
    """Zeros: what a crash leaves of a file whose size reached the disk and whose data did not."""
    for name in sound.files.keys() - {"tokenizer.json"}:
        data = sound.files[name]
        for cut in boundaries(name, data)[::every]:
            sound.put(name, data[:cut])
            if name == "manifest.json" and data[cut:] == b"\n":
                assert sound.loaded("all of it but for the end of its last line") == 2
            else:
                sound.is_found_out((name, "ends at", cut))
            if data[cut:].strip(b"\0"):
                sound.put(name, data[:cut] + bytes(len(data) - cut))
                sound.is_found_out((name, "zeros from", cut))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=LATER)])
def test_files_are_gone_empty_longer_or_replaced(sound: Sound, every: int) -> None:
    for name, data in [*sound.files.items()][::every]:
        (sound.new / name).unlink()
        sound.is_found_out((name, "gone"))
        for what, now in {"empty": b"", "longer": data + b"\n", "twice": data * 2}.items():
            sound.put(name, now)
            if what == "longer" and name == "manifest.json":
                assert sound.loaded("white space after the manifest is nothing") == 2
                sound.mend()
            else:
                sound.is_found_out((name, what))
    pairs = [*itertools.pairwise(sorted(sound.files.items()))]
    for (name, data), (other, theirs) in pairs[::every]:
        sound.put(name, theirs)
        sound.put(other, data)
        sound.is_found_out((name, "and", other, "changed places"))


@pytest.mark.parametrize("every", [9, pytest.param(3, marks=LATER)])
def test_files_of_another_step(sound: Sound, every: int) -> None:
    """Any mixture of the two checkpoints' files, but for the newer one itself, is found out."""
    groups = [["manifest.json"], ["index.json"], ["state.json"]]
    groups += [[name] for name in sound.shards[:3]] + [sound.shards[3:]]
    mixtures = list(itertools.product((False, True), repeat=len(groups)))
    for chosen in mixtures[1::every]:
        taken = [name for group, yes in zip(groups, chosen, strict=True) if yes for name in group]
        if all(sound.old[name] == sound.files[name] for name in taken):
            continue
        for name in taken:
            sound.put(name, sound.old[name])
        sound.is_found_out(("of step 1:", taken))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Walk over a JSON value: every value in it with the way there."""
    yield path, value
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))


OTHERS = [None, True, -1, 0, 1, 3, 2**63, 10**400, 1.5, "", "x", "../x", [], {}, [0], {"a": 0}]


def edits(document: Any, every: int) -> Iterator[tuple[Any, Any]]:
    """Yield (what was done, the document with one value replaced or removed): each `every`th."""
    chosen = []
    for path, value in leaves(document):
        others = list(OTHERS)
        if type(value) is int:
            others += [value + 1, value - 1, str(value), float(value)]
        if isinstance(value, str):
            others += [value[:-1], value.upper(), f"{value} "]
        chosen += [(path, o) for o in others if o != value or type(o) is not type(value)]
        chosen += [(path, ...)] if path else []
    for path, other in chosen[::every]:
        changed = json.loads(json.dumps({"": document}))
        inner = changed
        for key in ("", *path)[:-1]:
            inner = inner[key]
        if other is ...:
            del inner[path[-1]]
        else:
            inner[("", *path)[-1]] = other
        yield (path, other), changed[""]


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("every", [67, pytest.param(3, marks=LATER)])
def test_an_edited_manifest_is_found_out_by_its_digest(sound: Sound, every: int) -> None:
    manifest = json.loads(sound.files["manifest.json"])
    for what, changed in edits(manifest, every):
        sound.put("manifest.json", text(changed))
        sound.is_found_out(("manifest", what))


def is_harmless(sound: Sound, what: Any) -> None:
    """A lie whose digest is right loads to the bit, or is found out; or it ends the load, with a
    sentence that names the directory, where an older one would not do or tensors are being read."""
    try:
        sound.loaded(what)
    except CheckpointError as error:
        assert str(sound.new) in str(error), what
        sound.refused += 1
    sound.mend()


@pytest.mark.parametrize("every", [97, pytest.param(3, marks=LATER)])
def test_a_lying_manifest_with_the_right_digest(sound: Sound, every: int) -> None:
    manifest = json.loads(sound.files["manifest.json"])
    for what, changed in edits(manifest, every):
        if isinstance(changed, dict):
            changed["digest"] = self_digest(changed)
        sound.put("manifest.json", text(changed))
        place, to = what
        if place[:1] == ("files",) and place[1:2] != ("tokenizer.json",) and is_used(place, to):
            sound.is_found_out(("manifest", what))
        else:
            is_harmless(sound, what)


def is_used(place: Any, to: Any) -> bool:
    """Whether a load looks at this entry of a file: at one of the two sums."""
    if place[2:] == ("sha256",):
        return to is ... or place[1].endswith(".json")
    return place[2:] != ("xxh3_128",) or (to is not ... and not place[1].endswith(".json"))


def resign(sound: Sound, name: str, data: bytes) -> None:
    """Replace a file as someone does who can also compute hashes and digests."""
    sound.put(name, data)
    manifest = json.loads(sound.files["manifest.json"])
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["digest"] = self_digest(manifest)
    sound.put("manifest.json", text(manifest))


@pytest.mark.parametrize("every", [1597, pytest.param(7, marks=LATER)])
def test_a_lying_index_with_the_right_hashes(sound: Sound, every: int) -> None:
    index = json.loads(sound.files["index.json"])
    for what, changed in edits(index, every):
        resign(sound, "index.json", text(changed))
        is_harmless(sound, ("index", what))


def test_a_directory_of_another_number(sound: Sound) -> None:
    """Renamed; and with the manifest made to agree, so that only state.json tells."""
    for lie in (False, True):
        path = sound.root / "step_00000003"
        if lie:
            manifest = json.loads(sound.files["manifest.json"]) | {"step": 3}
            sound.put("manifest.json", text(manifest | {"digest": self_digest(manifest)}))
        os.rename(sound.new, path)
        notes: list[str] = []
        try:
            found = find_latest(sound.root, Grid(), pieces=sound.blank, note=notes.append)
        finally:
            os.rename(path, sound.new)
            sound.mend()
        assert found is not None and found.step == 1, f"lie: {lie}"
        assert len(notes) == 1 and "step_00000003 is skipped" in notes[0]


def test_what_else_stands_in_the_directory_is_not_taken(sound: Sound) -> None:
    """Whole copies under names that no save gives, and files that nobody listed."""
    names = "step_00000003.tmp-0a1b step_00000003.trash-0a1b step_3 step_00000003~ STEP_00000003"
    more = [*names.split(), "step_00000003.tmp", "step_00000003 (copy)", ".step_00000003"]
    more += ["step_00000003\n", "step_٣٣٣٣٣٣٣٣"]  # \d and $ mean more than they seem to
    manifest = json.loads(sound.files["manifest.json"]) | {"step": 3}
    state = json.loads(sound.files["state.json"]) | {"step": 3}
    manifest["files"]["state.json"] = {
        "size": len(text(state)),
        "sha256": hashlib.sha256(text(state)).hexdigest(),
    }
    for name in more:
        shutil.copytree(sound.new, sound.root / name)
        (sound.root / name / "state.json").write_bytes(text(state))
        signed = text(manifest | {"digest": self_digest(manifest)})
        (sound.root / name / "manifest.json").write_bytes(signed)
    for name in ("rank_00009-000.safetensors", "x.pkl", "index.json~", ".hidden"):
        (sound.new / name).write_bytes(b"\x80\x04.")
    (sound.root / "latest").write_text("step_00000001\n")
    try:
        assert sound.loaded("extra files") == 2
    finally:
        for name in more:
            shutil.rmtree(sound.root / name)
    sound.mend()
