# SPDX-License-Identifier: Apache-2.0
"""Record, for torchrun's next attempt, that this one made a step."""

from training.run.restarts import note_step
from training.run.step import DONE, Decision, Step


class Stepped:
    """Records the first step. error_file: TORCHELASTIC_ERROR_FILE of this rank."""

    def __init__(self, error_file: str) -> None:
        self.error_file = error_file

    def after_step(self, step: Step) -> Decision:
        """Record the first step."""
        note_step(self.error_file)
        return DONE
