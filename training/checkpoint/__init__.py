# SPDX-License-Identifier: Apache-2.0
"""Save and load a run: a directory that is complete or absent, in safetensors and JSON.

    step_00000123/
      manifest.json     format version, step, samples, layout; size and checksums of other files
      index.json        each canonical tensor: dtype, full shape, which file holds which rectangle
      state.json        everything but tensors: progress, config, tokenizer, model sizes
      rank_00000-000.safetensors ...

pieces       a rank's part as rectangles of canonical tensors, and which holder writes each
files        durable writes, and checksums
manifest     the three JSON files, checked when read; header: that of a safetensors file
finite       refuse values that are not finite, when saving and loading
agree        a failure on one rank becomes a failure on all
lock         one writer per directory
save         write to a temporary directory, then rename
stage        copy, and save in a thread while training continues
retain       which checkpoints are kept
evaluated    the loss on held-out data in a checkpoint
find         the newest complete directory, the same on every rank, or why there is none
load         fill local tensors from the files that hold their rectangles
huggingface  the same for a Hugging Face directory
stream       read whole tensors one at a time, to write them in another format
write_huggingface  a Hugging Face directory, written by all ranks
"""

from training.checkpoint.agree import first_error, together
from training.checkpoint.errors import CheckpointError, MismatchError, SaveError
from training.checkpoint.find import (
    Roots,
    below,
    find_latest,
    is_hugging_face,
    later_steps,
    not_saved,
    refuse_to_save,
    why_none,
)
from training.checkpoint.load import Checkpoint, load
from training.checkpoint.manifest import plain_name
from training.checkpoint.pieces import (
    NamedPiece,
    amax_pieces,
    buffer_pieces,
    load_pieces,
    parameter_pieces,
    state_pieces,
    weight_pieces,
)
from training.checkpoint.save import check_writable, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MismatchError",
    "NamedPiece",
    "Roots",
    "SaveError",
    "below",
    "check_writable",
    "find_latest",
    "first_error",
    "is_hugging_face",
    "later_steps",
    "load",
    "amax_pieces",
    "buffer_pieces",
    "load_pieces",
    "not_saved",
    "parameter_pieces",
    "plain_name",
    "refuse_to_save",
    "save",
    "state_pieces",
    "together",
    "weight_pieces",
    "why_none",
]
