"""One run of supervised fine-tuning on rank 0: steps over the rows, held-out losses, checkpoints, and the weights at the end.

A step is a function of the weights, the optimizer's state and its number, and a checkpoint holds all three, so a run that is killed and
resumed ends with the weights of one that was not. The journal returns to the checkpoint, as in reinforcement learning.

step         the rows of the step, by `RowOrder`; the learner; the step's row
evaluation   the held-out loss, before the first step, when it is due, and after the last
checkpoint   begun when it is due and written beside the next steps
end          the weights as a Hugging Face directory; the row of the end; the last checkpoint, which holds both
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import field

from pipeline.journal.reading import read
from pipeline.journal.rows import (
    COMPLETE,
    EndReason,
    EndRow,
    HeldoutLossRow,
    ImitationStepRow,
    PublicationRow,
    SkippedBatchRow,
    StartRow,
)
from pipeline.message import Message, decode, encode
from pipeline.part_times import PartTimes
from trainer.imitation.rows import ImitationData, ImitationRow, RowOrder, counts_words, make_batch_of_rows
from trainer.inputs import processes_words
from trainer.learner.config import NotFinite, StepMetrics
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.learner_thread import LearnerThread
from trainer.recipe import ImitationRecipe
from trainer.records import run_directory
from trainer.records.console import Console
from trainer.records.journal_writer import Journal
from trainer.records.sinks import Records, RunFacts, open_sinks
from trainer.weights.transport import DiskTransport

if TYPE_CHECKING:
    from trainer.feed import Feed

Part = Literal["train", "evaluation", "checkpoint", "other"]

ROWS_PER_CALL = 256
"""The number of held-out rows that the learner measures in one call, which bounds the memory of their results."""

BEAT_S = 1.0


def describe(recipe: ImitationRecipe, data: ImitationData) -> str:
    """The plan of a run in a few lines."""
    order, heldout = RowOrder.of(recipe, len(data.train)), "none"
    if data.heldout:
        num_tokens = sum(row.num_trained_tokens for row in data.heldout)
        words = counts_words(data.heldout_counts)
        heldout = f"{len(data.heldout):,} rows with {num_tokens:,} tokens to predict: {words}"
        heldout += f"; {data.shared_words}" if data.shared_words else ""
    num_trained = sum(row.num_trained_tokens for row in data.train)
    num_tokens = sum(row.num_tokens for row in data.train)
    return "\n".join(
        (
            f"plan: {order.num_steps:,} steps x {order.rows_per_step:,} rows: {order.num_in_all / order.num_rows:.2f} epochs",
            f"rows: {len(data.train):,} with {num_trained:,} trained tokens of {num_tokens:,}: {counts_words(data.counts)}",
            f"held out: {heldout}",
            f"learner: {processes_words(recipe)}",
            f"checkpoint: every {recipe.checkpoint.every_steps} steps",
        )
    )


class ImitationState(Message, frozen=True, kw_only=True):
    """The run's state in a checkpoint, besides weights and optimizer."""

    step: int = 0  # steps taken, skipped ones included
    digest: str = ""  # digest of all rows
    journal: dict[str, int] = field(default_factory=dict[str, int])  # size of each file in bytes


class ImitationRun:
    """The run, with the state of its newest checkpoint."""

    def __init__(
        self,
        recipe: ImitationRecipe,
        data: ImitationData,
        *,
        root: Path,
        run_id: str,
        console: Console,
        learner: LearnerThread,
        checkpoints: Checkpoints,
        records: Records,
        times: "PartTimes[Part]",
        step: int,
    ) -> None:
        self._recipe = recipe
        self._data = data
        self._root = root
        self._console = console
        self._learner = learner
        self._checkpoints = checkpoints
        self._records = records
        self._order = RowOrder.of(recipe, len(data.train))
        self._step = step
        self._digest = data.digest
        self._has_skipped = False  # whether the last batch was not finite
        self._begun: Path | None = None  # the checkpoint that is being written
        self._phase = "starting"
        self._stop = asyncio.Event()
        self._times = times
        self._transport = DiskTransport(
            run_id, directory=root / "weights", export=partial(learner.call_blocking, "export")
        )

    def stop(self) -> None:
        """Ends in good order after the current work."""
        self._console.say("stopping in good order; once more to stop at once")
        self._stop.set()

    async def run(self) -> EndReason:
        """Takes the remaining steps. Returns how the run ended; an error is recorded and raised."""
        beating = asyncio.create_task(self._beat(), name="heartbeat")
        try:
            return await self._run()
        except BaseException as error:
            run_directory.free_space(self._root)
            with contextlib.suppress(OSError):
                self._record_end("error", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
        finally:
            beating.cancel()

    async def _run(self) -> EndReason:
        if self._was_complete():
            self._say_weights()
            return "finished"
        self._records.append(
            StartRow(step=self._step, seconds={**self._times.lap()}, num_threads=self._learner.num_threads)
        )
        if not self._step and self._recipe.evaluation.before:
            await self._evaluate("before")
        while self._step < self._order.num_steps and not self._stop.is_set():
            await self._take()
            await self._follow_up()
        if self._stop.is_set():
            await self._begin_checkpoint()
            await self._finish_checkpoint()
            self._record_end(
                "stopped", f"stopped by a signal at step {self._step} of {self._order.num_steps}"
            )
            return "stopped"
        await self._end()
        return "finished"

    def _was_complete(self) -> bool:
        """Whether an earlier process took all steps of the run, so that nothing is left to do."""
        rows = read(self._root / "journal", EndRow)
        return any(row.is_complete and row.step == self._order.num_steps for row in rows)

    async def _beat(self) -> None:
        while True:
            self._console.beat(f"step {self._step} of {self._order.num_steps}: {self._phase}")
            await asyncio.sleep(BEAT_S)

    # Steps

    async def _take(self) -> None:
        """Takes the next step. Raises FloatingPointError if its batch and the one before it are not finite."""
        step, self._phase = self._step + 1, "optimizer step"
        chosen = self._order.rows_of(step)
        batch = make_batch_of_rows(step, chosen, self._data.train)
        with self._times.spent("train"):
            metrics: StepMetrics | NotFinite = await self._learner.call("step", batch)
        self._step = step
        if isinstance(metrics, NotFinite):
            self._skip(metrics, [self._data.train[number].place for _, number in chosen])
            return
        self._has_skipped = False
        num_sample_tokens = sum(sample.num_tokens for sample in batch.samples)
        self._records.append(
            ImitationStepRow(
                step=step,
                num_steps=self._order.num_steps,
                epoch=chosen[-1][0],
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                lr=metrics.lr,
                entropy=metrics.entropy,
                rows=tuple(number for _, number in chosen),
                num_trained_tokens=metrics.num_trained_tokens,
                num_samples=len(batch.samples),
                num_sample_tokens=num_sample_tokens,
                train_s=metrics.train_s,
                tokens_per_s=num_sample_tokens / metrics.train_s if metrics.train_s else 0.0,
                utilisation=metrics.utilisation,
                **self._seconds(metrics),
            )
        )

    def _seconds(self, metrics: StepMetrics) -> dict[str, float]:
        """The parts of the time since the last row. The learner's work outside of its three parts belongs to the rest."""
        spent = self._times.lap()
        inside_s = metrics.forward_s + metrics.backward_s + metrics.optimizer_s
        return {
            "wall_s": sum(spent.values()),
            "forward_s": metrics.forward_s,
            "backward_s": metrics.backward_s,
            "optimizer_s": metrics.optimizer_s,
            "checkpoint_s": spent["checkpoint"],
            "evaluation_s": spent["evaluation"],
            "other_s": spent["other"] + spent["train"] - inside_s,
        }

    def _skip(self, found: NotFinite, places: Sequence[str]) -> None:
        self._records.append(
            SkippedBatchRow(step=self._step, version=self._step, what=found.what, request_ids=tuple(places))
        )
        fact = f"step {self._step}: the {found.what} of a batch of {len(places)} rows is not finite"
        if self._has_skipped:
            raise FloatingPointError(f"{fact}, and so was the batch before it; see skipped_batches.jsonl")
        self._has_skipped = True
        self._console.say(f"{fact}: skipped it, the weights are unchanged; a second in a row ends the run")

    async def _follow_up(self) -> None:
        """The evaluation and the checkpoint that are due after a step; what belongs to the last step is part of the end."""
        if self._begun is not None and self._learner.here.is_save_written:
            await self._finish_checkpoint()
        if self._step == self._order.num_steps:
            return
        every_steps = self._recipe.evaluation.every_steps
        if every_steps and self._step % every_steps == 0:
            await self._evaluate(f"step_{self._step}")
        if self._step % self._recipe.checkpoint.every_steps == 0:
            await self._begin_checkpoint()

    # Held-out loss

    async def _evaluate(self, name: str) -> None:
        """Measures and records the held-out loss. Raises FloatingPointError if it is not finite."""
        rows, self._phase = self._data.heldout, "measuring the held-out loss"
        if not rows:
            return
        losses, likeliest = list[float](), list[int]()
        with self._times.spent("evaluation"):
            for start in range(0, len(rows), ROWS_PER_CALL):
                for loss, num_likeliest in await self._measure(rows[start : start + ROWS_PER_CALL]):
                    losses.append(loss)
                    likeliest.append(num_likeliest)
        sizes = tuple(row.num_trained_tokens for row in rows)
        if not math.isfinite(sum(losses)):
            raise FloatingPointError(
                f"the held-out loss after step {self._step} is not finite: lower learner.lr, or check data.heldout"
            )
        self._records.append(
            HeldoutLossRow(
                name=name,
                step=self._step,
                loss=sum(losses) / sum(sizes),
                likeliest_share=sum(likeliest) / sum(sizes),
                num_tokens=sum(sizes),
                row_losses=tuple(losses),
                row_likeliest=tuple(likeliest),
                row_tokens=sizes,
            )
        )

    async def _measure(self, rows: Sequence[ImitationRow]) -> list[tuple[float, int]]:
        """The sum of -log(pi) in nats over the trained tokens of each row, and how many of these greedy decoding gives."""
        of_rows = [row.as_samples(str(number)) for number, row in enumerate(rows)]
        samples = [sample for of_row in of_rows for sample in of_row]
        logprobs, likeliest = await self._learner.call("likelihoods", samples)
        found, place = list[tuple[float, int]](), 0
        for of_row in of_rows:
            parts = range(place, place + len(of_row))
            loss = -math.fsum(float(logprobs[number].sum(dtype="float64")) for number in parts)
            found.append((loss, sum(int(likeliest[number].sum()) for number in parts)))
            place += len(of_row)
        return found

    # Checkpoints and the end

    async def _begin_checkpoint(self) -> None:
        """Begins a checkpoint of the present state. If another one is being written, it is finished first."""
        await self._finish_checkpoint()
        self._phase = "beginning a checkpoint"
        with self._times.spent("checkpoint"):
            state = ImitationState(step=self._step, digest=self._digest, journal=self._records.checkpoint())
            place = self._checkpoints.place(self._step)
            await self._learner.call("begin_save", place, encode(state))
            self._begun = place

    async def _finish_checkpoint(self) -> None:
        if self._begun is None:
            return
        self._phase = "finishing a checkpoint"
        with self._times.spent("checkpoint"):
            place, self._begun = self._begun, None
            await self._learner.call("finish_save")
            await asyncio.to_thread(self._checkpoints.complete, place)

    async def _end(self) -> None:
        """What follows the last step. The checkpoint comes last, so that a resume before it repeats the rest."""
        every_steps = self._recipe.evaluation.every_steps
        if self._recipe.evaluation.after or (every_steps and self._step % every_steps == 0):
            await self._evaluate("after")
        self._phase, began_at = "writing the weights", time.time()
        version = await self._transport.prepare(self._step, self._step)
        self._records.append(
            PublicationRow(
                version=self._step, step=self._step, num_bytes=version.num_bytes, began_at=began_at
            )
        )
        self._record_end("finished", f"finished all {self._order.num_steps} steps")
        await self._begin_checkpoint()
        await self._finish_checkpoint()
        self._say_weights()

    def _record_end(self, reason: EndReason, detail: str) -> None:
        num_open = None if reason in COMPLETE else 0
        seconds = {**self._times.lap()}
        self._records.append(
            EndRow(
                step=self._step,
                version=self._step,
                reason=reason,
                detail=detail,
                seconds=seconds,
                num_open=num_open,
            )
        )

    def _say_weights(self) -> None:
        place = self._transport.directory_of(self._order.num_steps)
        self._console.say(f'the weights are in {place}; the next recipe names them as model = "{place}"')


@contextlib.asynccontextmanager
async def open_imitation(
    recipe: ImitationRecipe,
    data: ImitationData,
    *,
    root: Path,
    run_id: str,
    console: Console,
    make_feed: "Callable[[], Feed]",
) -> AsyncIterator[ImitationRun]:
    """Yields the run, ready to go on from its newest checkpoint; closes files afterwards. Raises ValueError if that is of other rows, or of
    a step after the last one.
    """
    times: PartTimes[Part] = PartTimes(get_args(Part), "other")
    checkpoints = Checkpoints(root / "checkpoints", keep=recipe.checkpoint.keep)
    console.say(f"run {run_id} in {root}")
    if data.shared_words:
        console.say(f"warning: {data.shared_words}")
    console.beat("building the learner")
    learner = await LearnerThread.start(make_feed)
    latest, state = checkpoints.latest(), ImitationState()
    if latest is not None:
        state = decode(await learner.call("restore", latest), ImitationState)
        _check_state(recipe, data, state, latest.name)
        console.say(f"resumed from {latest.name}")
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(_journal(root / "journal", state, console))
        facts = RunFacts(run_id, root, recipe, state.step + 1 if state.step else None)
        sinks = stack.enter_context(open_sinks(facts, console))
        yield ImitationRun(
            recipe,
            data,
            root=root,
            run_id=run_id,
            console=console,
            learner=learner,
            checkpoints=checkpoints,
            records=Records(journal, sinks, None),
            times=times,
            step=state.step,
        )
    await learner.stop()


def _check_state(recipe: ImitationRecipe, data: ImitationData, state: ImitationState, name: str) -> None:
    """Raises ValueError if the run cannot go on from this state, which is that of the checkpoint `name`."""
    if state.digest != data.digest:
        raise ValueError(
            f"data: the rows are not those of {name}: restore the files and [chat], or start a new run; a chat template that writes "
            "the day's date makes other rows each day, unless chat.template_kwargs gives the date"
        )
    num_steps = RowOrder.of(recipe, len(data.train)).num_steps
    if state.step > num_steps:
        key = "num_epochs" if recipe.num_steps is None else "num_steps"
        raise ValueError(f"{key} makes {num_steps} steps, and {name} has taken {state.step}: raise it")


@contextlib.contextmanager
def _journal(directory: Path, state: ImitationState, console: Console) -> Iterator[Journal]:
    """The journal in the checkpoint's state; its steps are shown again."""
    with Journal(directory) as journal:
        journal.truncate_to(state.journal)
        for row in read(directory, ImitationStepRow):
            console.recall(row)
        yield journal
