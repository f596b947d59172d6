# SPDX-License-Identifier: Apache-2.0
"""Megatron checkpoints that are damaged, or made to take all memory, are refused in a sentence.

A case is a sound checkpoint with one file replaced. The program has MEMORY of address space, and
the folder that it would write must not be there.
"""

import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from model import llama
from tests.sampling import sampled
from tests.tools.test_checkpoint_mcore import (
    interleave,
    model_of,
    weights_of,
    write_parts,
    write_progress,
)
from tests.unlucky import Case, check, drawn

MEMORY = 1 << 31
END = b"."


def sound(folder: Path) -> Path:
    """Write a checkpoint at iteration 7, and the config.json of its model."""
    place = write_parts(
        folder / "ckpt", interleave(weights_of(model_of(False).initialize(4)), True)
    )
    write_progress(place, lr=1e-3)
    (folder / "sizes").mkdir()
    config = llama.hf_config(model_of(False).config, "float32")
    (folder / "sizes" / "config.json").write_text(json.dumps(config))
    return place


def case(folder: Path, says: str, codes: tuple[int, ...] = (2,)) -> Case:
    argv = ["tools/checkpoint.py", "convert", "--from-mcore", folder / "ckpt"]
    argv += ["--hf-config", folder / "sizes", "--save", folder / "weft"]
    absent = [folder / "weft"] if codes == (2,) else []
    kept = [folder / "ckpt", folder / "sizes"]
    return Case(argv, codes, says, kept, MEMORY, absent=absent)


def doubled(levels: int, last: bytes = b"\x86") -> bytes:
    """Return opcodes of a tuple that holds one twice, which holds one twice, and so on."""
    return b")" + b"".join(b"q%ch%c" % (i, i) + last for i in range(levels))


def common(place: Path, data: bytes) -> None:
    """Put a pickle into common.pt."""
    with zipfile.ZipFile(place / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", data)


def nested_metadata(rng: random.Random, folder: Path) -> Case:
    place, levels = sound(folder), rng.randrange(30, 60)
    body = doubled(levels)
    ends = [body + END, b"ctorch\nSize\n" + body + b"R" + END, body + b"q\xff\x93" + END,
            body + body + b"\x93" + END]  # fmt: skip
    (place / ".metadata").write_bytes(b"\x80\x02" + rng.choice(ends))
    return case(folder, r"\.metadata \(\d+ bytes\): it ")


def nested_common(rng: random.Random, folder: Path) -> Case:
    """It is where the iteration or an argument is, so that a message would quote it."""
    body = doubled(rng.randrange(30, 60))
    common(sound(folder), b"\x80\x02}U\titeration" .replace(b"U", b"X").replace(
        b"\t", struct.pack("<I", 9)) + body + b"s" + END)  # fmt: skip
    return case(folder, r"common.pt: .*it expands to more than", (0, 2))


def deep(rng: random.Random, folder: Path) -> Case:
    depth = rng.choice([65, 1000, 100_000])
    (sound(folder) / ".metadata").write_bytes(b"\x80\x02" + b")" + b"\x85" * depth + END)
    return case(folder, "has more than 64 levels")


def itself(rng: random.Random, folder: Path) -> Case:
    one = rng.choice([b"]q\x00h\x00a", b"]q\x00(h\x00h\x00e", b"}q\x00K\x01h\x00s"])
    (sound(folder) / ".metadata").write_bytes(b"\x80\x02" + one + END)
    return case(folder, "has more than 64 levels")


def long_integers(rng: random.Random, folder: Path) -> Case:
    digits = rng.choice([5000, 100_000])
    value = (1 << digits * 3).to_bytes(digits, "little")
    forms = [b"\x8b" + struct.pack("<i", len(value)) + value, b"L" + b"9" * digits + b"L\n",
             b"I" + b"9" * digits + b"\n"]  # fmt: skip
    (sound(folder) / ".metadata").write_bytes(b"\x80\x02" + rng.choice(forms) + END)
    return case(folder, r"its opcode \w+ is not in|an integer of [\d,]+ bits")


def wrong_argument(rng: random.Random, folder: Path) -> Case:
    key = rng.choice(["lr", "min_lr", "weight_decay", "adam_beta1", "clip_grad", "seed"])
    values = [float("nan"), float("inf"), -float("inf"), 1 << 63, 1 << 400, "many", True]
    write_progress(sound(folder), **{key: rng.choice(values)})
    return case(folder, f"common.pt: its argument {key} is .*, not a valid value")


def too_many_samples(rng: random.Random, folder: Path) -> Case:
    """The weights alone are taken, from sample 0 on, as docs/megatron.md has it."""
    key = rng.choice(["consumed_train_samples", "seq_length"])
    value = rng.choice([1 << 62, 1 << 63, 1 << 500, float("nan"), (1,) * 99])
    write_progress(sound(folder), **{key: value})
    return case(folder, "are not counts.*begins at sample 0", (0,))


def zip_of(rng: random.Random, folder: Path) -> Case:
    """Members that are encrypted, deflated, or of an unknown method."""
    place = sound(folder)
    file = place / rng.choice(["common.pt", "__0_0.distcp"])
    data = bytearray(file.read_bytes())
    what, value = rng.choice([(8, 1), (10, 8), (10, 12), (10, 99)])
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + what] = value
    at = -1
    while (at := data.find(b"PK\x03\x04", at + 1)) >= 0:
        data[at + what - 2] = value
    file.write_bytes(bytes(data))
    return case(folder, r"is (encrypted|compressed), as torch.save never does", (0, 2))


def other_bytes(rng: random.Random, folder: Path) -> Case:
    place = sound(folder)
    file = place / rng.choice([".metadata", "common.pt", "metadata.json"])
    data = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(bytes(data))
    return case(folder, "checkpoint: | -> ", (0, 2))


def opcodes(rng: random.Random, folder: Path) -> Case:
    some = b"()]}\x85\x86\x87t0aesuRb\x81\x93\x94q\x00h\x00K\x01NX\x00\x00\x00\x00Q."
    body = bytes(rng.choice(some) for _ in range(rng.randrange(400)))
    (sound(folder) / ".metadata").write_bytes(b"\x80\x02" + body)
    return case(folder, r"\.metadata \(\d+ bytes\): ")


def a_config(rng: random.Random, folder: Path) -> Case:
    sound(folder)
    file = folder / "sizes" / "config.json"
    config = json.loads(file.read_text())
    key = rng.choice(["model_type", "hidden_size", "num_hidden_layers", "vocab_size"])
    config[key] = rng.choice([[], {}, 10**30, -1, "x", 1e9, [[]]])
    file.write_text(json.dumps(config))
    return case(folder, "checkpoint: ")


KINDS: dict[str, Callable[[random.Random, Path], Case]] = {
    kind.__name__: kind
    for kind in (
        nested_metadata, nested_common, deep, itself, long_integers, wrong_argument,
        too_many_samples, zip_of, other_bytes, opcodes, a_config,
    )
}  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), sampled(drawn(KINDS, 36), 9))
def test_checkpoints_that_are_hostile_or_unlucky(launcher, tmp_path, name, seed):
    check(launcher, KINDS[name], seed, tmp_path)


def test_a_sound_checkpoint_goes_in_and_out(launcher, tmp_path):
    """The control, with the same memory. What is written is the owner's alone."""
    sound(tmp_path)
    check(launcher, lambda rng, folder: case(folder, "iteration 7, 4 samples", (0,)), 0, tmp_path)
    out = ["convert", "--to-mcore", tmp_path / "out", "--load", tmp_path / "weft"]
    done = launcher.python("tools/checkpoint.py", *out)
    assert done.returncode == 0, done.stderr
    places = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert len(places) > 4 and not any(path.stat().st_mode & 0o077 for path in places)
