# SPDX-License-Identifier: Apache-2.0
"""Define the errors of checkpoints. Each message is one sentence for the user."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or none of those found is complete."""


class MismatchError(CheckpointError):
    """The checkpoint is valid, but of another model, precision or program; so are older ones."""


class SaveError(CheckpointError):
    """A checkpoint was not written. Earlier ones are untouched."""
