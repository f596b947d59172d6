# SPDX-License-Identifier: Apache-2.0
"""Save a run and find it again: a directory that is complete or absent, in safetensors and JSON.

    step_00000123/
      manifest.json          format version, step, samples, layout, size and SHA-256 of every other
      file index.json             each canonical tensor: dtype, full shape, which file holds which
      rectangle state.json             everything that is not a tensor: progress, config, tokenizer,
      model sizes rank_00000-000.safetensors ...

pieces.py  what a rank holds, in rectangles of canonical tensors, and which of its holders writes
one files.py   bytes that are on disk when the call returns, with their SHA-256
manifest.py  what the three JSON files say, checked when read
agree.py   one failure on one rank becomes everybody's
save.py    write aside, then rename
find.py    the newest directory that is whole, the same on every rank, or why not
load.py    fill local tensors from whatever files hold their rectangles
"""

from training.checkpoint.errors import CheckpointError, MismatchError, SaveError
from training.checkpoint.find import find_latest
from training.checkpoint.load import Checkpoint, load
from training.checkpoint.pieces import NamedPiece, parameter_pieces, state_pieces
from training.checkpoint.save import check_writable, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MismatchError",
    "NamedPiece",
    "SaveError",
    "check_writable",
    "find_latest",
    "load",
    "parameter_pieces",
    "save",
    "state_pieces",
]
