"""Chooses the task of each group: all in turn, or more often those whose groups are likely to teach something.

A group teaches something only if its rewards differ. If a policy solves a task with probability p, a group of n members has such a signal
with probability 1 - p^n - (1-p)^n: nearly always for p around one half, never for a task that is always or never solved. `Curriculum` draws
tasks by this number. It knows p from the rewards of earlier episodes, of which only the newest count, because the policy changes.

p itself is drawn from its posterior (Thompson sampling, Biometrika 1933), a beta distribution with Jeffreys' prior. So tasks of which
little is known are tried now and then, and a share of the groups follows the plain order, so that no task is forgotten, whatever its
rewards were.

The evidence is a function of the journal's episode rows in their order, and a draw one of seed, cursor and evidence. So a resumed run
begins with the evidence of its checkpoint, bit for bit. A group that is open at the checkpoint keeps its task.
"""

from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.journal.rows import EpisodeRow
from trainer.recipe import CurriculumRecipe

PRIOR = 0.5  # solved and unsolved episodes of a task before its first, by Jeffreys


class TaskOrder:
    """The ids of all tasks once per epoch, in a new random order each time. Raises ValueError if there are none."""

    def __init__(self, task_ids: Sequence[str], *, seed: int) -> None:
        if not task_ids:
            raise ValueError("tasks.train holds no task; give a file with at least one")
        self.task_ids = task_ids
        self._seed = seed

    def __getitem__(self, cursor: int) -> str:
        num_tasks = len(self.task_ids)
        epoch, place = divmod(cursor, num_tasks)
        return self.task_ids[int(np.random.default_rng((self._seed, epoch)).permutation(num_tasks)[place])]


class Curriculum:
    """Chooses the task of each group, as the recipe says."""

    def __init__(
        self,
        order: TaskOrder,
        recipe: CurriculumRecipe,
        *,
        seed: int,
        group_size: int,
        rows: Iterable[EpisodeRow] = (),
    ) -> None:
        """`rows` are those of the journal, cut back to the checkpoint."""
        self._order = order
        self._recipe = recipe
        self._seed = seed
        self._group_size = group_size
        self._places = {task_id: place for place, task_id in enumerate(order.task_ids)}
        # Two numbers for each task: its solved and its unsolved episodes, of which older ones count less.
        self._evidence: npt.NDArray[np.float64] = np.zeros((len(order.task_ids), 2))
        self._num_plain = 0  # groups before `_plain_before` that follow the order
        self._plain_before = 0
        for row in rows:
            self.observe(row)

    def observe(self, row: EpisodeRow) -> None:
        """Takes a settled episode into account, if it is one of training with a reward."""
        if row.purpose == "train" and row.reward is not None and row.task_id in self._places:
            self.add(row.task_id, row.reward)

    def add(self, task_id: str, reward: float) -> None:
        """Takes an episode of a known task into account. Rewards are bounded to 0..1."""
        place, solved = self._places[task_id], min(max(reward, 0.0), 1.0)
        self._evidence[place] *= 1 - 1 / self._recipe.window_episodes
        self._evidence[place] += (solved, 1 - solved)

    def choose(self, cursor: int, *, live: Container[str], quarantined: Container[str]) -> str:
        """The id of the task of the group at `cursor`. `live` are the ids of tasks whose groups are not settled.

        A task in quarantine is chosen only if the plain order says so, or if all tasks are in quarantine.
        """
        if self._recipe.kind == "plain":
            return self._order[cursor]
        chance = np.random.default_rng((self._seed, cursor))
        if chance.random() < self._recipe.plain_share:
            task_id = self._order[self._plain_number(cursor)]
            if task_id not in quarantined:
                return task_id
        weights = self._signals(chance) ** self._recipe.sharpness
        for left_out in ((live, quarantined), (quarantined,), ()):
            free = [not any(one in ids for ids in left_out) for one in self._order.task_ids]
            if any(free):
                weights = np.where(free, weights, 0.0)
                break
        total = weights.sum()
        chances = weights / total if total else np.array(free) / sum(free)
        return self._order.task_ids[int(chance.choice(len(chances), p=chances))]

    def _signals(self, chance: np.random.Generator) -> npt.NDArray[np.float64]:
        """The probability that a group has a signal, for each task, with a success rate drawn from its posterior."""
        rates = chance.beta(PRIOR + self._evidence[:, 0], PRIOR + self._evidence[:, 1])
        return 1 - rates**self._group_size - (1 - rates) ** self._group_size

    def _plain_number(self, cursor: int) -> int:
        """The number of groups before `cursor` that follow the plain order."""
        if cursor < self._plain_before:
            self._num_plain = self._plain_before = 0
        for before in range(self._plain_before, cursor):
            self._num_plain += np.random.default_rng((self._seed, before)).random() < self._recipe.plain_share
        self._plain_before = cursor
        return self._num_plain
