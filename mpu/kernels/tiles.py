# SPDX-License-Identifier: Apache-2.0
"""Compute the order of tiles, the rank whose rows a tile covers, and the chunks it touches.

Every rank holds m rows. They are cut twice, independently, each time from the rank's first row:

    rows of one rank   0 . . . . . . . . . . . . . . m
    tiles              |  0  |  1  |  2  |  3  |  4 |      block_m rows: one product of a program
    chunks             |    0    |    1    |    2   |      chunk_rows rows: covered by one flag

The last of each may be short. No tile belongs to two ranks, so it has one owner; it may touch
several chunks (tile 1 here: chunks 0 and 1). Addresses and waits both come from these functions.
The kernels compile the same source (`triton.jit(tile_at)`), so each function must be self-contained
and use only integers.
"""


def tile_at(
    index: int, rank: int, start: int, stride: int, world: int,
    m: int, n: int, block_m: int, block_n: int, group: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Return (owner, row tile, column tile) of the index-th tile that `rank` computes.

    Owners follow one another as rank + start, rank + start + stride, ... (mod world): (0, 1) begins
    with the rank's own rows, (1, 1) with the next rank's and ends with its own,
    (world - 1, world - 1) begins with the previous rank's. Within an owner `group` row tiles
    iterate over all columns together, so that a wave of programs shares its operands in cache.
    """
    rows = (m + block_m - 1) // block_m
    columns = (n + block_n - 1) // block_n
    owner = (rank + start + index // (rows * columns) * stride) % world
    inside = index % (rows * columns)
    top = inside // (group * columns) * group
    height = min(rows - top, group)
    inside = inside % (group * columns)
    return owner, top + inside % height, inside // height


def tile_count(owners: int, m: int, n: int, block_m: int, block_n: int) -> int:
    """Return the number of tiles of `owners` ranks with m rows and n columns each."""
    return owners * ((m + block_m - 1) // block_m) * ((n + block_n - 1) // block_n)


def chunks_of_tile(tile: int, m: int, block_m: int, chunk_rows: int) -> tuple[int, int]:
    """Return the first chunk that a row tile touches, and the one after the last."""
    return tile * block_m // chunk_rows, (min((tile + 1) * block_m, m) - 1) // chunk_rows + 1


def tiles_of_chunk(chunk: int, m: int, block_m: int, chunk_rows: int) -> int:
    """Return how many row tiles touch a chunk; all must be done before its flag may rise."""
    last = (min((chunk + 1) * chunk_rows, m) - 1) // block_m
    return last - chunk * chunk_rows // block_m + 1
