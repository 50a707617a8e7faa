"""The books of a run: the enqueued requests, the results, and their fates. They share one event loop and one view of Redis."""

import dataclasses
from collections.abc import Callable
from zlib import crc32

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from pipeline.judge import Judge
from pipeline.request import Context, Limits
from trainer.inputs import Inputs
from trainer.recipe import Recipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.admission import Admission
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.curriculum import Curriculum, TaskOrder, source_order
from trainer.rollouts.dispatch import (
    Dispatcher,
    GroupSource,
    GroupSources,
    Quarantine,
    RequestForm,
    sampling_of,
)
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.judging import Judging
from trainer.rollouts.ledger import Ledger, LedgerState, Rows


class Books:
    """The books of one run. The classes that change them get all of them."""

    def __init__(
        self,
        redis: ArqRedis,
        recipe: Recipe,
        inputs: Inputs,
        form: RequestForm,
        judge: Judge | None,
        *,
        restored: LedgerState,
        rows: Rows,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        """`restored` is the checkpoint's state, `journal` is cut back to the checkpoint, and `rows` also forwards to the sinks.
        `judge` is None if nothing is judged.
        """
        self.redis, self.run_id, self.recipe, self.inputs = redis, form.run_id, recipe, inputs
        self.restored = restored
        self.admission = Admission(
            max_lag_versions=recipe.admission.max_lag_versions,
            groups_per_step=recipe.batch.groups_per_step,
            num_steps=recipe.num_steps,
        )
        self.groups = _group_book_of(recipe, self.admission)
        self.sources = _sources_of(recipe, inputs, form, journal)
        self.ledger = Ledger(rows, restored, observe=self.sources.observe, source_at=self.sources.name_at)
        self.quarantine = Quarantine(journal, {task.id for task in inputs.train if task.calibration})
        self.heldout = HeldOut(
            redis,
            form,
            inputs.heldout,
            inputs.heldout_sets,
            recipe.evaluation,
            sampling=sampling_of(recipe),
            seed=recipe.seed,
            ledger=self.ledger,
            report=rows.append,
        )
        self.dispatcher = Dispatcher(
            redis,
            self.sources,
            self.groups,
            ledger=self.ledger,
            quarantine=self.quarantine,
            open_groups=restored.open_groups,
        )
        self.judging = Judging(redis, form.run_id, recipe, judge, self.groups, self.ledger, say=say)
        self.closer = GroupCloser(self.groups, self.ledger, self.quarantine, self.judging.waits)


def _group_book_of(recipe: Recipe, admission: Admission) -> GroupBook:
    return GroupBook(
        admission,
        min_valid_of=recipe.min_valid_of,
        stragglers=recipe.admission.stragglers,
        train_without_signal=recipe.trains_without_signal,
        requires_judgements=recipe.judge.required,
        has_teacher=recipe.judge.method == "teacher",
    )


def _sources_of(recipe: Recipe, inputs: Inputs, form: RequestForm, journal: Journal) -> GroupSources:
    rows, by_source = list(read(journal.directory, EpisodeRow)), recipe.by_source
    sources = list[GroupSource]()
    for given in inputs.sources:
        one, tasks = by_source[given.name], {task.id: task for task in given.tasks}
        seed = recipe.seed + crc32(given.name.encode())  # so that no source draws as another one
        curriculum = Curriculum(
            TaskOrder([*tasks], seed=seed),
            recipe.curriculum,
            seed=seed,
            group_size=one.rollout.group_size,
            rows=rows,
        )
        its_form = dataclasses.replace(
            form,
            limits=Limits(**asdict(one.rollout.limits)),
            context=Context(**asdict(one.rollout.context)),
            agent_config=given.agent_config,
            harness=given.harness,
        )
        sources.append(GroupSource(given.name, one, its_form, tasks, curriculum))
    return GroupSources(sources, source_order(recipe))
