"""The parts of a run on rank 0, built from its recipe, its directory and, if there is one, its newest checkpoint."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline import connection, redis_calls
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, PublicationRow, Row, StalenessRow, StepRow
from pipeline.judge import Judge
from pipeline.request import Context, Limits
from pipeline.settings import redis_settings
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs, JudgeForm
from trainer.loop.alarms import AlarmStop, recalled_alarms
from trainer.loop.budget import AdmissionBudget
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.state import RunState, StepTimes
from trainer.recipe import Recipe, WeightsRecipe
from trainer.records.alarms import Alarms
from trainer.records.console import Console
from trainer.records.journal_writer import Journal
from trainer.records.sinks import Records, RunFacts, Sink, open_sinks
from trainer.rollouts.admission import StalenessController, bounds_of
from trainer.rollouts.books import Books
from trainer.rollouts.dispatch import RequestForm, new_ids
from trainer.rollouts.intake import Intake, RunStreams
from trainer.rollouts.ledger import LedgerState, decode_state
from trainer.rollouts.open_requests import OpenRequests
from trainer.rollouts.recording import RolloutRecorder
from trainer.weights.deliveries import Deliveries
from trainer.weights.engines import Engines
from trainer.weights.publish import Publisher, open_transport, sole_policy
from trainer.weights.transport import WeightTransport

if TYPE_CHECKING:
    from trainer.feed import Feed


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run. Each part of the loop gets all of them, and keeps private what no other part needs."""

    books: Books  # the enqueued requests and the results that arrived
    root: Path  # the run's directory
    console: Console
    records: Records  # the journal, and every sink
    alarms: Alarms
    state: RunState
    times: StepTimes
    learner: LearnerThread
    checkpoints: Checkpoints
    recorder: RolloutRecorder
    transport: WeightTransport
    engines: Engines | None  # None: nothing is sampled
    # The following parts are made from the ones above.
    intake: Intake = field(init=False)
    streams: RunStreams = field(init=False)
    requests: OpenRequests = field(init=False)
    staleness: StalenessController = field(init=False)  # continues from the state in the journal
    budget: AdmissionBudget = field(init=False)
    publisher: Publisher = field(init=False)
    deliveries: Deliveries = field(init=False)

    def __post_init__(self) -> None:
        books = self.books
        self.intake = Intake(books)
        self.streams = RunStreams(books, self.intake, self.recorder)
        self.requests = OpenRequests(books)
        self.staleness = StalenessController(
            bounds_of(self.recipe.admission),
            changes=read(self.journal, StalenessRow),
            steps=read(self.journal, StepRow),
        )
        self.budget = AdmissionBudget(books, self.state, self.staleness)
        self.publisher = Publisher(self.redis, self.run_id, transport=self.transport)
        self.deliveries = deliveries_of(
            self.redis, self.run_id, self.transport, self.engines, self.recipe.weights
        )

    @property
    def run_id(self) -> str:
        return self.books.run_id

    @property
    def recipe(self) -> Recipe:
        return self.books.recipe

    @property
    def redis(self) -> ArqRedis:
        return self.books.redis

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    def record(self, row: Row) -> None:
        self.records.append(row)

    def say(self, line: str) -> None:
        self.console.say(line)


@contextlib.asynccontextmanager
async def open_run(
    recipe: Recipe,
    inputs: Inputs,
    *,
    root: Path,
    run_id: str,
    router_url: str,
    console: Console,
    make_feed: "Callable[[], Feed]",
) -> AsyncIterator[Run]:
    """Yields the run, ready for its loop; closes connections and files afterwards. Raises ValueError if Redis cannot be reached."""
    times, checkpoints = StepTimes(), Checkpoints(root / "checkpoints", keep=recipe.checkpoint.keep)
    async with contextlib.AsyncExitStack() as stack:
        redis = await connect(console.say)
        stack.push_async_callback(redis.aclose)
        lease = engines = None
        if recipe.weights.engines == "router":
            lease = await stack.enter_async_context(sole_policy(redis, run_id))
            engines = await stack.enter_async_context(Engines(router_url, precision=recipe.weights.precision))
        console.say(f"run {run_id} in {root}")
        console.beat("building the learner")
        learner = await LearnerThread.start(make_feed)
        restored = await _restore(checkpoints, learner, console)
        journal = stack.enter_context(_journal(root / "journal", restored, console))
        state = RunState.resumed(restored, read(root / "journal", PublicationRow))
        if lease is not None:
            lease.when_taken(state.supersede)
        alarms = recalled_alarms(recipe, root / "journal")
        facts = RunFacts(run_id, root, recipe, restored.step + 1 if restored.step else None)
        records = Records(journal, stack.enter_context(_sinks(recipe, facts, state, console)), alarms)
        yield Run(
            books=Books(
                redis,
                recipe,
                inputs,
                await request_form(redis, run_id, recipe, inputs),
                await announced_judge(redis, inputs.judge),
                restored=restored,
                rows=records,
                journal=journal,
                say=console.say,
            ),
            root=root,
            console=console,
            records=records,
            alarms=alarms,
            state=state,
            times=times,
            learner=learner,
            checkpoints=checkpoints,
            recorder=stack.enter_context(RolloutRecorder(redis, run_id, root, recipe.rollouts)),
            transport=await _transport(recipe.weights, run_id, root, learner, stack),
            engines=engines,
        )
        await learner.stop()


async def connect(say: Callable[[str], None] = lambda line: None) -> ArqRedis:
    """The Redis of this machine's settings. `say` gets a warning if a restart of Redis would lose work. Raises ValueError if there
    is no connection to it.
    """
    redis = await connection.connect(redis_settings().url)
    if forgets := await redis_calls.until_answered(lambda: connection.forgets(redis)):
        say(forgets)
    return redis


async def request_form(redis: ArqRedis, run_id: str, recipe: Recipe, inputs: Inputs) -> RequestForm:
    """The part that all requests about held-out tasks have in common. Announces the tokenizer."""
    return RequestForm(
        run_id=run_id,
        limits=Limits(**asdict(recipe.rollout.limits)),
        agent_config=inputs.agent_config,
        tokenizer=await redis_calls.until_answered(lambda: put_tokenizer(redis, inputs.tokenizer)),
        ids=new_ids(),
        control_share=recipe.grading.control_share,
        num_controls=recipe.grading.num_controls,
        report_routing=recipe.learner.routing_replay,
        context=Context(**asdict(recipe.rollout.context)),
        harness=inputs.harness,
        asides_are_trained=recipe.rollout.asides,
        names_adapter=recipe.weights.adapters == "alone",
    )


async def announced_judge(redis: ArqRedis, form: JudgeForm | None) -> Judge | None:
    """The judge in requests to judge; None if nothing is judged. Announces the judge's tokenizer."""
    return None if form is None else await redis_calls.until_answered(lambda: form.announced(redis))


def deliveries_of(
    redis: ArqRedis, run_id: str, transport: WeightTransport, engines: Engines | None, recipe: WeightsRecipe
) -> Deliveries:
    """The object that delivers the versions of a run to its engines."""
    return Deliveries(
        redis,
        run_id,
        transport=transport,
        engines=engines,
        mode=recipe.pause,
        deadline_s=recipe.engine_deadline_s,
        at_once=recipe.engines_at_once,
    )


async def _transport(
    recipe: WeightsRecipe, run_id: str, root: Path, learner: LearnerThread, stack: contextlib.AsyncExitStack
) -> WeightTransport:
    return await open_transport(
        recipe,
        run_id,
        directory=root / "weights",
        export=learner.call_blocking,
        keep=recipe.keep,
        stack=stack,
    )


@contextlib.contextmanager
def _sinks(recipe: Recipe, facts: RunFacts, state: RunState, console: Console) -> Iterator[list[Sink]]:
    """The sinks of the recipe, and the one that lets an alarm stop the run."""
    with open_sinks(facts, console) as sinks:
        yield [*sinks, AlarmStop(recipe.alarms.stop_on, state.stop_by_alarm)]


def _journal(directory: Path, state: LedgerState, console: Console) -> Journal:
    """The journal in the checkpoint's state; its steps are shown again, and the episodes of each source counted."""
    journal = Journal(directory)
    journal.truncate_to(state.journal)
    for row in chain(read(directory, StepRow), read(directory, EpisodeRow)):
        console.recall(row)
    return journal


async def _restore(checkpoints: Checkpoints, learner: LearnerThread, console: Console) -> LedgerState:
    """Restores the learner from the newest checkpoint; returns the ledger's state in it, or an empty one if there is none."""
    latest = checkpoints.latest()
    if latest is None:
        return LedgerState()
    state = decode_state(await learner.call("restore", latest))
    console.say(f"resumed from {latest.name}")
    return state
