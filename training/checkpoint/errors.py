# SPDX-License-Identifier: Apache-2.0
"""Name what can go wrong with a checkpoint. Each message is one sentence for whoever started us."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or none of those found is whole."""


class MismatchError(CheckpointError):
    """The checkpoint is sound but of another model, precision or program: no older one would do."""


class SaveError(CheckpointError):
    """A checkpoint was not written. What was there before still is."""
