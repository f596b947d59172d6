# SPDX-License-Identifier: Apache-2.0
"""The .bin/.idx reader and writer: the bytes are Megatron's, and everything read is checked."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def golden(documents, code=8):
    """Lay a pair out field by field with struct, independently of our writer."""
    kind = CODES[code]
    width = struct.calcsize(kind)
    lengths = [len(document) for document in documents]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    idx += struct.pack("<QQ", len(lengths), len(lengths) + 1)
    idx += struct.pack(f"<{len(lengths)}i", *lengths)
    idx += struct.pack(
        f"<{len(lengths)}q", *[sum(lengths[:i]) * width for i in range(len(lengths))]
    )
    idx += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    tokens = [token for document in documents for token in document]
    return idx, struct.pack(f"<{len(tokens)}{kind}", *tokens)


def put(directory, idx, data, name="data"):
    (directory / f"{name}.idx").write_bytes(idx)
    (directory / f"{name}.bin").write_bytes(data)
    return str(directory / name)


DOCUMENTS = [[5, 6, 7], [], [9], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("code", CODES)
def test_reads_the_documented_layout(tmp_path, code):
    data = IndexedTokens(put(tmp_path, *golden(DOCUMENTS, code)))
    assert len(data) == 4 and data.dtype.itemsize == struct.calcsize(CODES[code])
    for i, document in enumerate(DOCUMENTS):
        assert data.read(i, 0, len(document)).tolist() == document
    assert data.read(3, 2, 3).tolist() == [3, 4, 5]


@pytest.mark.parametrize("code", CODES)
def test_writes_the_documented_layout(tmp_path, code):
    data = IndexedTokens(put(tmp_path, *golden(DOCUMENTS, code)))
    with IndexedWriter(str(tmp_path / "deep" / "out"), data.dtype) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    idx, tokens = golden(DOCUMENTS, code)
    assert (tmp_path / "deep" / "out.idx").read_bytes() == idx
    assert (tmp_path / "deep" / "out.bin").read_bytes() == tokens


def test_joins_files_as_if_written_at_once(tmp_path):
    one = put(tmp_path, *golden(DOCUMENTS[:2]), name="one")
    two = put(tmp_path, *golden(DOCUMENTS[2:]), name="two")
    with IndexedWriter(str(tmp_path / "all"), token_dtype(100)) as writer:
        writer.add_file(one)
        writer.add_file(two)
    assert (tmp_path / "all.idx").read_bytes() == golden(DOCUMENTS)[0]
    assert (tmp_path / "all.bin").read_bytes() == golden(DOCUMENTS)[1]
    wide = put(tmp_path, *golden(DOCUMENTS, 4), name="wide")
    with pytest.raises(ValueError, match="wide.idx: token type"):
        with IndexedWriter(str(tmp_path / "mixed"), token_dtype(100)) as writer:
            writer.add_file(wide)
    assert not list(tmp_path.glob("mixed*"))


def test_several_sequences_a_document_and_modes(tmp_path):
    """Megatron's multi-sequence documents and modes are read, and documents survive a join."""
    idx, data = golden(DOCUMENTS)
    idx = idx[:26] + struct.pack("<Q", 3) + idx[34 : 34 + 12 * 4] + struct.pack("<3q", 0, 3, 4)
    prefix = put(tmp_path, idx + bytes(4), data)
    assert IndexedTokens(prefix).document_indices.tolist() == [0, 3, 4]
    with IndexedWriter(str(tmp_path / "two"), token_dtype(100)) as writer:
        writer.add_file(prefix)
        writer.add_file(prefix)
    assert IndexedTokens(str(tmp_path / "two")).document_indices.tolist() == [0, 3, 4, 7, 8]


def test_empty_file_and_token_types(tmp_path):
    with IndexedWriter(str(tmp_path / "none"), token_dtype(65499)):
        pass
    assert len(IndexedTokens(str(tmp_path / "none"))) == 0
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


def test_a_token_outside_of_the_type_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(ValueError, match="document 1 holds token ids from 3 to 65536"):
        with IndexedWriter(str(tmp_path / "out"), token_dtype(100)) as writer:
            writer.add([1])
            writer.add([3, 65536])
    assert not list(tmp_path.iterdir())


def test_digest_follows_content_not_place(tmp_path):
    same = [put(tmp_path, *golden(DOCUMENTS), name=name) for name in ("a", "b")]
    other = put(tmp_path, *golden([[5, 6, 7], [], [8], [1, 2, 3, 4, 5, 6]]), name="c")
    cut = put(tmp_path, *golden([[5, 6], [7], [9], [1, 2, 3, 4, 5, 6]]), name="d")
    digests = [IndexedTokens(prefix).digest for prefix in (*same, other, cut)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_ids_outside_of_the_vocabulary_are_refused(tmp_path):
    data = IndexedTokens(put(tmp_path, *golden(DOCUMENTS)))
    data.check_vocabulary(10)
    with pytest.raises(
        ValueError, match="data.bin: tokens: ids from 1 to 9 are not those of a voc"
    ):
        data.check_vocabulary(9)
    signed = IndexedTokens(put(tmp_path, *golden([[3], [-1]], 4), name="signed"))
    with pytest.raises(ValueError, match="signed.bin: tokens: ids from -1 to 3"):
        signed.check_vocabulary(9)
    IndexedTokens(put(tmp_path, *golden([[]]), name="empty")).check_vocabulary(1)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.idx: cannot be read: No such file"):
        IndexedTokens(str(tmp_path / "nowhere"))
    prefix = put(tmp_path, *golden(DOCUMENTS))
    with pytest.raises(ValueError, match="without .bin or .idx"):
        IndexedTokens(prefix + ".bin")
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ValueError, match="data.bin: cannot be read"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("data", [b"", golden(DOCUMENTS)[1][:-1], golden(DOCUMENTS)[1] + b"\0\0"])
def test_a_bin_of_another_size_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="data.bin: size: .* bytes, but the lengths in the .idx"):
        IndexedTokens(put(tmp_path, golden(DOCUMENTS)[0], data))


def honest(idx, data):
    """Judge a pair in plain Python: the specification the reader is fuzzed against."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00":
        return False
    version, code, n, m = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or code not in CODES or len(idx) - 34 not in (12 * n + 8 * m, 13 * n + 8 * m):
        return False
    lengths = struct.unpack_from(f"<{n}i", idx, 34)
    pointers = struct.unpack_from(f"<{n}q", idx, 34 + 4 * n)
    documents = list(struct.unpack_from(f"<{m}q", idx, 34 + 12 * n))
    width = struct.calcsize(CODES[code])
    starts = [sum(lengths[:i]) * width for i in range(n + 1)]
    climbing = documents == sorted(documents) and documents[:1] == [0] and documents[-1:] == [n]
    tiled = min(lengths, default=0) >= 0 and list(pointers) == starts[:-1]
    return climbing and tiled and starts[-1] == len(data)


damage = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 10**4), st.integers(0, 255)),
    st.tuples(st.just("u64"), st.integers(0, 10**4), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("near"), st.integers(0, 10**4), st.integers(-3, 3)),
    st.tuples(st.just("cut"), st.integers(0, 10**4), st.just(0)),
    st.tuples(st.just("grow"), st.integers(0, 40), st.integers(0, 255)),
)


def spoil(raw, kind, at, value):
    """Apply one damage to bytes."""
    if kind == "grow":
        return raw + bytes([value]) * at
    at %= len(raw) + 1
    if kind == "cut":
        return raw[:at]
    if kind == "byte":
        return raw[:at] + bytes([value]) + raw[at + 1 :]
    if kind == "u64":
        return raw[:at] + struct.pack("<Q", value) + raw[at + 8 :]
    old = int.from_bytes(raw[at : at + 4], "little")
    return raw[:at] + ((old + value) % 2**32).to_bytes(4, "little") + raw[at + 4 :]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    code=st.sampled_from(sorted(CODES)),
    damages=st.lists(st.tuples(st.booleans(), damage), min_size=1, max_size=3),
)
def test_spoiled_pairs_are_judged_rightly(tmp_path_factory, lengths, code, damages):
    """Accept exactly the honest pairs, refuse the others by name, read no byte more."""
    idx, data = golden([list(range(length)) for length in lengths], code)
    for in_bin, (kind, at, value) in damages:
        if in_bin:
            data = spoil(data, kind, at, value)
        else:
            idx = spoil(idx, kind, at, value)
    directory = tmp_path_factory.getbasetemp()
    prefix = put(directory, idx, data, name="fuzz")
    if not honest(idx, data):
        with pytest.raises(ValueError, match=r"fuzz\.(idx|bin): [a-z]+"):
            IndexedTokens(prefix)
        return
    reader = IndexedTokens(prefix)
    read = [reader.read(i, 0, int(reader.lengths[i])) for i in range(len(reader))]
    assert b"".join(part.tobytes() for part in read) == data
