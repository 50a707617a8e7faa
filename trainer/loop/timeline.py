"""How far behind a weight version is, on the line of steps that the run kept.

Without a crash, versions and steps go hand in hand, and the lag is their difference. After one, steps taken
since the checkpoint are lost, but rollouts drawn under their weights are not: such weights count as those
of the last step before them that the run kept.
"""

from bisect import bisect_right


class Timeline:
    """Every version published and kept, with the optimizer steps it contains; both only grow."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []

    def add(self, version: int, step: int) -> None:
        """`version` is the newest now. The one that is newest already may be added again."""
        if self._versions[-1:] == [version]:
            return
        assert not self._versions or version > self._versions[-1], "versions are never used twice"
        self._versions.append(version)
        self._steps.append(step)

    def lag(self, version: int) -> int:
        """Steps that the newest version contains and `version` does not."""
        return self._steps[-1] - self.steps_in(version)

    def steps_in(self, version: int) -> int:
        """Steps that `version` contains."""
        return self._steps[max(bisect_right(self._versions, version) - 1, 0)]
