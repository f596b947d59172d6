# SPDX-License-Identifier: Apache-2.0
"""Note that an attempt of torchrun's made a step, for the attempt after it."""

from training.run.restarts import note_step
from training.run.step import DONE, Decision, Step


class Stepped:
    """Notes the first step. error_file: TORCHELASTIC_ERROR_FILE of this rank."""

    def __init__(self, error_file: str) -> None:
        self.error_file = error_file

    def after_step(self, step: Step) -> Decision:
        """Note the first one."""
        note_step(self.error_file)
        return DONE
