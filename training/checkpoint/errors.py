# SPDX-License-Identifier: Apache-2.0
"""Define what can go wrong with a checkpoint. Each message is one sentence for the user."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or none of those found is complete."""


class MismatchError(CheckpointError):
    """The checkpoint is sound but of another model, precision or program: no older one would do."""


class SaveError(CheckpointError):
    """A checkpoint was not written. Earlier ones are untouched."""
