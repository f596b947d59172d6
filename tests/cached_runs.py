# SPDX-License-Identifier: Apache-2.0
"""Runs of the program that several tests of a module compare with: each is made once."""

from pathlib import Path

from tests.launcher import Launcher, Result


class CachedRuns:
    """Make runs. at: the step whose checkpoint a resumed run begins with."""

    def __init__(self, launcher: Launcher, at: int) -> None:
        self.launcher, self.at = launcher, at
        self.made: dict[tuple[int, str, Path | None], Result] = {}

    def once(self, ranks: int, words: str, load: Path | None) -> Result:
        """Return a run to the last step, from the first or from what `load` holds of step `at`.

        A resumed one saves what it has loaded before it goes on.
        """
        key = (ranks, words, load)
        if key not in self.made:
            argv = words.split() + (["--load", f"{load}", "--ckpt-step", f"{self.at}"] * bool(load))
            result = self.launcher.run(ranks, argv, save_first=bool(load))
            assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
            self.made[key] = result
        return self.made[key]
