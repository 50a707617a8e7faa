"""Every key of a recipe: its type, its default, and its meaning, which is the comment after its field or in the lines above it.

`python -m trainer.recipe --reference` makes docs/recipe.md of these comments, and refusals quote them, so they are written for users: each
begins with a noun or a verb and is complete without those of its neighbours. Tables that also travel in requests (`pipeline.request`) and
the learner's (`trainer.learner.config`) are defined there. The types of numbers and of any text are in `pipeline/message.py`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from pipeline.chat import CallFormat, ThoughtFormat
from pipeline.judge import JudgeMethod
from pipeline.message import (
    Amount,
    Count,
    Line,
    PartShare,
    PositiveAmount,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Share,
)
from pipeline.request import Budget, Context, Limits, Retries, Sampling
from pipeline.task import BestControl
from trainer.learner.config import LearnerConfig
from trainer.recipe.wording import refusal

AdvantageKind = Literal["leave_one_out", "group_mean", "group_mean_std"]
CreditMethod = Literal[
    "outcome",
    "outcome_plus_mean",
    "step_wise",
    "outcome_then_steps",
    "potential",
    "distill",
    "outcome_plus_distill",
]
Stragglers = Literal["wait", "train", "withhold"]
Unverified = Literal["refuse", "heldout", "allow"]
PauseMode = Literal["retract", "in_place", "abort"]
Transport = Literal["disk", "delta", "distributed"]
Precision = Literal["learner", "fp8"]
EndingLimit = Literal["turns", "context", "wall_s", "format_errors", "sandbox"]
"""What may end an episode before the policy does, as in `pipeline.trajectory.Exhausted`."""

AlarmKind = Literal[
    "success_falls",
    "gap_grows",
    "lag_saturates",
    "signal_is_masked",
    "format_errors_rise",
    "format_errors_prevail",
    "trees_rise",
    "entropy_collapses",
    "judge_is_gamed",
    "disk_fills",
    "redis_fills",
]
AlarmShare = Annotated[
    float, msgspec.Meta(ge=0, lt=1, description="a share below 1, or 0 to switch the alarm off")
]

PathText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[^\x00-\x1f\x7f-\x9f]+\Z", description="a path: text without line breaks, not empty"
    ),
]
# It is a part of the names of directories, of weight versions and of Redis keys.
RunName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z",
        description='up to 100 letters, digits, ".", "_" and "-", the first a letter or a digit',
    ),
]
VariableName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A([A-Za-z_][A-Za-z0-9_]*)?\Z",
        description="the name of an environment variable: letters, digits and _",
    ),
]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the recipe. msgspec does not inherit `kw_only`, type checkers do not see an inherited `frozen`: say both."""


class TaskFiles(Table, frozen=True, kw_only=True):
    """Task files, made by `python -m workers.tasksets` and verified by `python -m workers.verify`."""

    train: Line = ""  # tasks to train on, a tasks.jsonl; [[sources]] take its place
    heldout: Line = ""  # held-out tasks, another tasks.jsonl; only evaluations need them
    # Further files of held-out tasks by name, as in { verified = "verified.jsonl" }. Every evaluation plays each of them too, with as many
    # episodes as of tasks.heldout, or as many as it has tasks for.
    heldout_sets: dict[str, PathText] = msgspec.field(default_factory=dict[str, PathText])
    # Treatment of tasks that are not verified: "refuse" refuses them, "heldout" allows them among held-out tasks only, "allow" allows them.
    unverified: Unverified = "refuse"
    # Weakness above which a task is left out of training. Weakness is the share of wrong patches that pass the task's tests all the same;
    # verification makes these patches from the known fix. A task is left out if the lower end of the share's 95 % interval is above
    # this number: one pass among few patches shows little, and a changed fix may be as right as the fix. No task is left out by default.
    max_weakness: Share | None = None
    # Least proof of a pass that a task must allow to be trained on. "confirmed": every test that needs the fix can be contradicted by a
    # control. "partial": some cannot. "none": all tasks are trained on.
    min_control: BestControl = "none"


class CurriculumRecipe(Table, frozen=True, kw_only=True):
    """Choice of the task and the size of each group."""

    # Rule of the choice. "plain": every task once per epoch, in a new random order each time. "signal": tasks are drawn by the probability
    # that a group's rewards differ, 1 - p^n - (1-p)^n for a task that the policy solves with probability p and groups of
    # n = rollout.group_size members.
    kind: Literal["plain", "signal"] = "plain"
    # Share of the groups that follow the plain order under "signal" all the same, so that a task which nobody solves is tried again.
    plain_share: Share = 0.05
    # Number of episodes, of whichever tasks, after which the rewards of a task are forgotten under "signal" and by max_group_size.
    memory_episodes: PositiveCount = 500_000
    # Exponent of that probability under "signal": 1 draws a task in proportion to it, larger numbers prefer the best tasks.
    sharpness: PositiveAmount = 16.0
    # Largest number of members of a group. A group has the fewest members, from rollout.group_size on, with which its rewards differ with
    # the probability signal_share, so those of easy and hard tasks are larger. Where this many are too few for that, a group has this
    # many, or rollout.group_size if more episodes than these are expected until two rewards differ. By default every group has
    # rollout.group_size members.
    max_group_size: Annotated[int, msgspec.Meta(ge=2, le=2**31)] | None = None
    # Probability that the rewards of a group differ, 1 - p^n - (1-p)^n, which the size n of a group is chosen for with max_group_size.
    signal_share: PartShare = 0.9


class SamplingRecipe(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling by the policy. Training needs top_p = 1 and no top_k, because log-probs are of the full distribution."""


class BudgetRecipe(Budget, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of failures of one class that a request may have, and the wait after each."""


class RetriesRecipe(Retries, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retries of a failed request, by class of failure. A class that is given is given in full."""

    # Failures where the engine refuses what the policy made of its conversation.
    policy: BudgetRecipe = BudgetRecipe(tries=1)
    # Failures of the task's image or its setup; set 2 or more tries where hosts hold different images.
    environment: BudgetRecipe = BudgetRecipe(tries=1)
    # Failures of Docker, the engine or the network.
    infrastructure: BudgetRecipe = BudgetRecipe(tries=5)
    # Failures of grading, which broke off without a verdict.
    grader: BudgetRecipe = BudgetRecipe(tries=3, first_s=2.0)
    # Failures of a request that no worker can carry out, or that kills every worker that tries.
    poison: BudgetRecipe = BudgetRecipe(tries=1)


class LimitsRecipe(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that end an episode. Deadlines start when a worker claims the request, never in the queue."""

    retries: RetriesRecipe = RetriesRecipe()


class ContextRecipe(Context, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Treatment of an episode whose next reply may not fit into rollout.limits.context_tokens, and of earlier thoughts.

    Each turn is trained on exactly the context that it saw, and each sampled token once, whatever is cut.
    """

    # Treatment of a context that is full. "head_tail": turns are taken out of the middle, the first and the newest stay, and each prompt
    # leaves room for a whole reply. "stop": the episode ends.
    policy: Literal["stop", "head_tail"] = "head_tail"


class Rollout(Table, frozen=True, kw_only=True):
    """Groups of rollouts: several episodes of one task, whose rewards are compared with each other."""

    # Number of rollouts of one task that share a baseline; 2 at least, but for credit.method = "distill", which has no baseline.
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    # File of the agent, a YAML of mini-swe-agent 1.x or 2.x; or a list of files and of values such as "agent.step_limit=50", merged in
    # this order. `python -m workers.agent FILE` says what becomes of each key.
    agent: PathText | tuple[PathText, ...]
    # Do as mini-swe-agent does even where our own way is better; docs/agents.md names the differences.
    exact: bool = False
    # Agent program that plays in place of the agent: the name of one that comes with Swerve, such as "codex", or a harness file. Its image
    # has to be on every Docker host. [harnesses.md](harnesses.md) says what is there.
    harness: Line = ""
    # Train the asides of an agent program, such as titles that it asks for, as its other replies are trained.
    asides: bool = False
    sampling: SamplingRecipe = SamplingRecipe()
    limits: LimitsRecipe = LimitsRecipe()
    context: ContextRecipe = ContextRecipe()
    # Time from a group's first claim until the group closes with the members that have arrived, if they are enough. A value below
    # limits.wall_s, or the agent file's own limit if that is less, is refused, and one below limits.wall_s + limits.grade_wall_s is warned
    # of; that sum is the default.
    group_deadline_s: PositiveSeconds | None = None
    # Time that a group may wait for its first claim before it is given up as failed; there is no limit by default.
    queue_s: PositiveSeconds | None = None
    # Number of members of a group that may be enqueued again after an infrastructure failure; half of the group by default.
    group_refills: Count | None = None

    @property
    def agent_specs(self) -> tuple[str, ...]:
        """Files and values, in the order in which they are merged."""
        return (self.agent,) if isinstance(self.agent, str) else self.agent


class SourceSampling(Table, frozen=True, kw_only=True):
    """Sampling of a source's rollouts. The temperature is the same for all, because a step trains them together."""

    max_new_tokens: PositiveCount | None = None  # largest number of tokens that one turn may sample


class SourceRecipe(Table, frozen=True, kw_only=True):
    """A source of training tasks, and how its rollouts differ from `[rollout]`."""

    # Name of the source in journal, report and console: lower-case letters, digits, - and _.
    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A[a-z][a-z0-9_-]*\Z",
            description="lower-case letters, digits, - and _, the first a letter",
        ),
    ]
    tasks: PathText  # tasks to train on, a tasks.jsonl; no two sources may have a task in common
    share: PositiveAmount  # weight of the source's groups, relative to the shares of the others
    # Agent's file, or a list of files and values, as rollout.agent has it. It plays even if rollout.harness names a program.
    agent: PathText | tuple[PathText, ...] | None = None
    # Agent program that plays, as rollout.harness has it; "" is the built-in loop.
    harness: Line | None = None
    # Number of rollouts of one task that share a baseline.
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    # Keys of rollout.limits that differ, as in { turns = 100, wall_s = 3600 }.
    limits: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    # Keys of rollout.context that differ, as in { policy = "stop" }, which an agent program needs.
    context: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    sampling: SourceSampling = SourceSampling()

    @property
    def changes(self) -> dict[str, Any]:
        """The keys of `[rollout]` that differ, with their values."""
        given = {name: getattr(self, name) for name in ("agent", "harness", "group_size")}
        if self.agent is not None and self.harness is None:
            given["harness"] = ""
        given |= {"sampling": {"max_new_tokens": self.sampling.max_new_tokens}}
        return {"limits": self.limits, "context": self.context, **given}


def _overlaid(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with other values, and the tables in it likewise. None changes nothing."""
    given = {
        name: _overlaid(table.get(name) or {}, value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
        if value is not None
    }
    return {**table, **given}


class BatchRecipe(Table, frozen=True, kw_only=True):
    """Groups that an optimizer step takes, and the advantages that their rewards become."""

    groups_per_step: PositiveCount  # number of groups that one optimizer step trains
    # Number of graded members below which a group is dropped; by default half of the group, and 2 at least, or 1 if credit.method is
    # "distill".
    min_valid_members: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    # Baseline that is subtracted from a reward. "leave_one_out": the mean of the other members. "group_mean": the mean of the group.
    # "group_mean_std": the same, and the difference is divided by the group's standard deviation.
    advantage: AdvantageKind = "leave_one_out"
    # Compute the gradient of groups that are ready while the others of the step are awaited. The sum is the same as of the whole batch
    # but for rounding; needs learner.num_epochs = 1 and learner.num_minibatches = 1.
    streaming: bool = False
    # Train groups whose rewards are all equal, too, on what the scores of a judge add. Distillation does so in any case. This is refused
    # unless [credit] reads scores,
    # because advantages of 0 teach nothing and take weight from the others. If batch.advantage is "group_mean_std", the methods
    # outcome_plus_mean and step_wise make full advantages of the smallest differences between scores there.
    train_without_signal: bool = False
    # Number of groups in a row with equal rewards after which the run ends, because there is nothing left to learn.
    max_groups_without_signal: PositiveCount = 200
    # Number of groups in a row with too few graded members after which the run ends as failing; it can be resumed.
    max_failed_groups: PositiveCount = 50


class ChatRecipe(Table, frozen=True, kw_only=True):
    """Conversion of messages to the model's text, and of its text to messages. `python -m pipeline.templates` tries a chat template."""

    template: Line = ""  # file of a chat template in Jinja; the model's own by default
    # Further variables of the chat template, such as enable_thinking = false.
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    # Format in which the model writes tool calls; by default it is recognised by the words of the chat template, and the plan names it.
    tool_calls: CallFormat | None = None
    # Marks that the model writes around its thoughts; by default they are recognised by the words of the chat template.
    thoughts: ThoughtFormat | None = None


class GradingRecipe(Table, frozen=True, kw_only=True):
    """Control runs that check a pass before its reward is 1."""

    # Gradings that have control runs, in which one test must fail because its expectation was made wrong: "always" all, "never" none,
    # or a share of them that is drawn by chance.
    controls: Literal["always", "never"] | PartShare = "always"
    # Number of control runs of a grading that has any. The true run and k controls come in an order drawn by chance, so a patch that
    # cheats and cannot distinguish them gets reward 1 at most once in k + 1 times.
    num_controls: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1

    @property
    def control_share(self) -> float:
        return (
            {"always": 1.0, "never": 0.0}[self.controls] if isinstance(self.controls, str) else self.controls
        )


class CreditRecipe(Table, frozen=True, kw_only=True):
    """Credit: the advantages per token that rewards, a judge's scores or a teacher's log-probs become. [judge.md](judge.md) has the
    formulas, [distillation.md](distillation.md) those of the teacher. Rewards are never altered.
    """

    # Use of a judge's scores. "outcome": scores are recorded and not trained. "outcome_plus_mean": the mean score of a trajectory is
    # added to its outcome. "step_wise": each turn is compared with the same turn of the other members. "outcome_then_steps": scores
    # move credit between the turns of a trajectory and leave its total as it is. "potential": the score of a turn is subtracted from the
    # advantage of the next one, as the value of the state in which that begins, so pleasing the judge is not an objective.
    # "distill": the log-prob of each token by a teacher, less the policy's own; rewards are not used. "outcome_plus_distill": the same is
    # added to the outcome. Both need judge.method = "teacher".
    method: CreditMethod = "outcome"
    # Weight of the scores, or of the teacher. At 0 every method with scores is the same as "outcome", bit for bit; a teacher needs more.
    coefficient: Share = 0.1

    @property
    def distills(self) -> bool:
        """Whether advantages are made of a teacher's log-probs, so that a trajectory without them is not trained."""
        return self.method in ("distill", "outcome_plus_distill")

    @property
    def reads_judgements(self) -> bool:
        """Whether a judgement can change an advantage. If not, nothing waits for a judge."""
        return self.method != "outcome" and self.coefficient > 0


class JudgeEndpointRecipe(Table, frozen=True, kw_only=True):
    """OpenAI-compatible server that writes the votes, instead of engines that the judges' own router serves."""

    api_base: Line = ""  # URL of the server, such as "http://host:30000/v1"; the judges' router by default
    model: Line = ""  # name of the model on the server
    key_env: VariableName = ""  # environment variable of the judge workers that holds the server's key
    key_file: Line = ""  # file on the judge workers' hosts that holds the server's key
    # Further fields of the request's body.
    options: dict[str, str | int | float | bool] = msgspec.field(
        default_factory=dict[str, str | int | float | bool]
    )


class JudgeRecipe(Table, frozen=True, kw_only=True):
    """Judge that scores each step of a finished rollout, from -1 to 1: see [judge.md](judge.md). A teacher
    ([distillation.md](distillation.md)) gives log-probs in place of scores.

    `python -m workers.judge` carries it out, beside the workers and without their sandboxes. What a score is worth is
    said in `[credit]`.
    """

    # Method of scoring steps. "votes": a language model writes a verdict, several times. "reward_model": a model with one scalar output.
    # "rule": a rule that needs no model. "function": a Python function that the judge workers' operator provides.
    # "teacher": a language model with the policy's vocabulary gives the log-prob of every token that the policy sampled, for distillation.
    # "none": no judge.
    method: Literal["none"] | JudgeMethod = "none"
    # Name of the rule or function; if the method uses a model, its name for people.
    name: Line = ""
    # YAML file with the judge's prompts; the built-in prompts by default.
    templates: Line = ""
    # Directory of the judge's model in the format of Hugging Face, for its tokenizer and chat template; not needed with an endpoint. A
    # teacher's tokenizer must have every token of the policy's, under the same id.
    tokenizer: Line = ""
    # Number of votes on each step; each has a seed of its own.
    num_votes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3
    temperature: Amount = 1.0  # temperature at which a vote is sampled
    max_new_tokens: PositiveCount = 2048  # largest number of tokens that one vote may sample
    # Largest number of tokens of a vote's prompt. A token counts as 3 characters where there is no tokenizer.
    prompt_tokens: PositiveCount = 16384
    history_steps: Count = 8  # number of earlier steps that a prompt shows
    vote_s: PositiveSeconds = 300.0  # time after which one vote, or one answer of a teacher, counts as failed
    score_format_errors: bool = False  # score also turns whose reply held no command
    score_submission: bool = False  # score also the turn that submitted
    endpoint: JudgeEndpointRecipe = JudgeEndpointRecipe()
    # Time that a group that is ready for its step waits for its judgements. After that it is trained with those that it has. It does not
    # wait while no judge works, nor if [credit] reads no judgements, nor if it would be trained more than admission.max_lag_versions late.
    wait_s: Seconds = 600.0
    # Wait for the judgements of each group whatever happens, and enqueue no group while no judge works. A teacher needs this.
    required: bool = False

    @property
    def is_on(self) -> bool:
        return self.method != "none"


class OverlongRecipe(Table, frozen=True, kw_only=True):
    """Treatment of episodes that are too long, or almost too long: [learning.md](learning.md). Rewards are never altered."""

    # Limits whose trajectories are not trained, as in ["turns", "context", "wall_s"]: if one of them ended a trajectory, only its reward
    # counts, in the baseline of its group.
    filter: tuple[EndingLimit, ...] = ()
    # Amount subtracted from the reward of a full context where advantages are computed; 0 subtracts nothing.
    penalty: Amount = 0.0
    # Length of the range before rollout.limits.context_tokens over which the penalty grows from 0 to its full amount.
    buffer_tokens: PositiveCount = 4096


class StalenessRecipe(Table, frozen=True, kw_only=True):
    """Bounds between which admission runs ahead, and what lowers it. A run begins at the lower bound. These keys are used only if
    admission.staleness is "controlled".
    """

    least_versions: Count = 1  # smallest number of versions that admission may run ahead
    # Largest number of versions that admission may run ahead; admission.max_lag_versions by default.
    most_versions: Count | None = None
    # Effective sample size of a lag's tokens, as a share, below which these tokens are no longer useful. Here and in the next two each
    # token counts by its signal, its advantage times how uncertain the policy is of it: [learning.md](learning.md).
    min_ess_share: PartShare = 0.5
    # Share of the signal of a lag's tokens that the objective masks or vetoes above which these tokens are no longer useful.
    max_masked_share: PartShare = 0.2
    # Distance of the policy from the weights that sampled a lag's tokens, in nats, mean over their signal, above which these are no
    # longer useful.
    max_behaviour_kl: PositiveAmount = 1.0
    # Steps after a reduction before admission may run further ahead again.
    patience_steps: PositiveCount = 10


class AdmissionRecipe(Table, frozen=True, kw_only=True):
    """Number of groups that may be open at once, so that no trajectory is trained too late and no memory overflows."""

    # Largest lag of a trained trajectory: the number of versions between the weights that sampled it and those that it trains.
    max_lag_versions: Count = 4
    # Rule for how far admission runs ahead of the steps. "fixed": as far as max_lag_versions allows. "controlled": between the bounds of
    # admission.control, depending on what the objective does to stale tokens, and never beyond max_lag_versions.
    staleness: Literal["fixed", "controlled"] = "fixed"
    control: StalenessRecipe = StalenessRecipe()
    # Treatment of a group that would exceed the lag: "wait" waits for it before the step, "train" trains it late, "withhold" leaves it out.
    stragglers: Stragglers = "wait"
    # Time between two comparisons of open requests with the queue, which find what Redis lost.
    sweep_every_s: PositiveSeconds = 10.0
    # Size of trajectories that Redis may hold until a checkpoint contains them; half of Redis's memory limit, if that is less. Beyond it, a
    # checkpoint is written early, and groups are admitted one at a time.
    max_queue_bytes: PositiveCount = 4 * 1024**3
    # Size of trajectories that the trainer's memory may hold until their step; beyond it, groups are admitted one at a time.
    max_held_bytes: PositiveCount = 4 * 1024**3


class WeightsRecipe(Table, frozen=True, kw_only=True):
    """Delivery of weight versions to the engines."""

    # Number of published versions kept on disk, besides those that an engine may still need.
    keep: Annotated[int, msgspec.Meta(ge=2, le=2**53)] = 3
    # Treatment of an engine's running requests while weights change: "retract" preempts and recomputes them, "in_place" pauses them,
    # "abort" ends them.
    pause: PauseMode = "retract"
    # Transport of weights to an engine. "disk": it reads the trainer's directory, on a file system that both share. "delta": the
    # blocks that changed are sent to a receiver on the engine's host, which keeps versions on its local disk. "distributed": a broadcast
    # by NCCL to engines on GPUs, by gloo to engines on the CPU. See [weights.md](weights.md).
    transport: Transport = "disk"
    # Content of a version if learner.lora.rank is set. "merged": whole weights. "alone": the adapters, which engines load beside the
    # weights that the run started with; they need SGLang's --enable-lora. See [weights.md](weights.md).
    adapters: Literal["merged", "alone"] = "merged"
    # Type of a version's numbers. "learner": learner.dtype. "fp8": FP8 with a scale for each block of 128 x 128, where the model is
    # published in it; the learner goes on in learner.dtype. See [weights.md](weights.md#weights-in-fp8).
    precision: Precision = "learner"
    # Port of the receiver on each engine host; used only if transport is "delta".
    receiver_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 30300
    # Engines that get the weights: "router" every engine that the router knows, "none" no engine, so that they are only written to disk.
    engines: Literal["router", "none"] = "router"
    # Time that one engine may take to load a version. Training does not wait: an engine that is much slower than another is taken out
    # of routing before that, and comes back when it serves the newest version.
    engine_deadline_s: PositiveSeconds = 600.0
    # Number of engines in routing that may load weights at the same time, so that the others go on sampling; 0 allows all.
    engines_at_once: Count = 0


class EvaluationRecipe(Table, frozen=True, kw_only=True):
    """Held-out evaluations during the run. Engines get no newer weights until one has ended; training goes on as far as the lag allows."""

    # Number of episodes that are sampled as in training; a multiple of samples_per_task.
    episodes: Count = 0
    samples_per_task: PositiveCount = 1  # number of the sampled episodes that each task gets
    greedy_episodes: Count = 0  # number of episodes at temperature 0, one for each task
    before: bool = True  # evaluate the starting weights
    after: bool = True  # evaluate the last weights
    # Steps from one evaluation to the next; 0 evaluates only as before and after say.
    every_steps: Count = 0


class AuditRecipe(Table, frozen=True, kw_only=True):
    """Audit of log-probs: the learner recomputes sampled tokens under the weights that sampled them, and compares."""

    # Share of each step's trained tokens that is audited; whole samples are drawn by chance. Each costs a forward pass for every weight
    # version in it. Nothing is audited if learner.snapshots_kept is 0, because there is nothing to compare with.
    share: Share = 0.02


class CheckpointRecipe(Table, frozen=True, kw_only=True):
    """Checkpoints of the learner and of the run's accounts. Trajectories are acknowledged when one contains them."""

    # Steps from one checkpoint to the next. One is also written when Redis is full and at the end, and put off while an evaluation goes on.
    every_steps: PositiveCount = 10
    keep: PositiveCount = 2  # number of checkpoints kept on disk


class RolloutsRecipe(Table, frozen=True, kw_only=True):
    """Rollouts that are kept in the run's directory, where they outlive Redis: see [rollouts.md](rollouts.md)."""

    # Rollouts that are kept: "all", "none", or a share of the groups, and then every failed rollout too.
    keep: Literal["all", "none"] | PartShare = "all"
    # Disk space for kept rollouts, compressed; beyond it, the oldest are removed.
    max_bytes: Annotated[int, msgspec.Meta(ge=2**20, le=2**53)] = 64 * 1024**3
    # Keep what each step did with each token of a kept rollout: the learner's log-prob, the advantage, the weight, and why a
    # token had no gradient. This takes about 7 bytes a token.
    tokens: bool = False

    @property
    def keeps_tokens(self) -> bool:
        return self.tokens and self.keep != "none"


class WandbRecipe(Table, frozen=True, kw_only=True):
    """Weights & Biases; needs `pip install wandb`. What it sends is numbers, the recipe, and a table of rollouts without their text."""

    project: Line = ""  # project of Weights & Biases that shows the run; nothing is sent by default
    entity: Line = ""  # user or team that owns the project; by default the one that is logged in
    # Time of sending: "online" sends during the run, "offline" writes into the run's directory, for `wandb sync` later.
    mode: Literal["online", "offline"] = "online"
    tags: tuple[Line, ...] = ()  # labels of the run


class MlflowRecipe(Table, frozen=True, kw_only=True):
    """MLflow; needs `pip install mlflow-skinny sqlalchemy alembic`."""

    experiment: Line = ""  # experiment of MLflow that shows the run; nothing is sent by default
    # URI of the tracking server; the file mlflow.db in the run's directory by default.
    tracking_uri: Line = ""


class SinksRecipe(Table, frozen=True, kw_only=True):
    """Sinks that show the numbers of a run besides the console, under the same names everywhere: [sinks.md](sinks.md)."""

    tensorboard: bool = True  # write event files of TensorBoard into the directory board of the run
    # Write the file metrics.jsonl of the run, one line for each step, audit and evaluation.
    jsonl: bool = True
    wandb: WandbRecipe = WandbRecipe()
    mlflow: MlflowRecipe = MlflowRecipe()


class AlarmsRecipe(Table, frozen=True, kw_only=True):
    """Alarms of a run about itself: [alarms.md](alarms.md). An alarm begins once and ends once; both are a line of the console and a row
    of the journal. A limit of 0 switches its alarm off.
    """

    # Number of steps in a window, over which numbers of steps are averaged before they are compared.
    window_steps: Annotated[int, msgspec.Meta(ge=2, le=2**53)] = 20
    # Limit of success_falls: the mean reward of the last window, or held-out success, is this far below the best before, and the
    # difference is larger than chance explains.
    success_drop: AlarmShare = 0.2
    # Limit of gap_grows: the mean log-prob gap of the last window is this many times that of the first, and above gap_floor_nats.
    gap_growth: Amount = 5.0
    # Mean log-prob gap of the last window below which gap_grows does not begin, in nats.
    gap_floor_nats: Amount = 0.02
    # Limit of lag_saturates: the mean lag of the last window is above this share of admission.max_lag_versions. It is off by default,
    # because such a lag is normal where the learner is slower than the engines.
    lag_share: AlarmShare = 0.0
    # Limit of signal_is_masked: the objective masked or vetoed this share of the signal of the last window. Each token counts by its
    # advantage times how uncertain the policy is of it.
    masked_signal_share: AlarmShare = 0.2
    # Limit of format_errors_rise: the share of training episodes that format errors ended is this far above the lowest before, and
    # the difference is larger than chance explains.
    format_error_rise: AlarmShare = 0.2
    # Limit of format_errors_prevail: format errors ended this share of the last 20 training episodes, from the first on.
    format_error_share: AlarmShare = 0.9
    # Limit of trees_rise: the share of training episodes whose tree was graded in place of what the agent printed is this far above the
    # lowest before, and the difference is larger than chance explains.
    tree_rise: AlarmShare = 0.1
    # Limit of entropy_collapses: the mean entropy of the last window is below this share of the first one's.
    entropy_share: AlarmShare = 0.1
    # Watch for judge_is_gamed: the judge's scores are higher than in the first window while rewards are lower, and both differences
    # have 99.8 % intervals that exclude 0.
    judge_gaming: bool = True
    # Limit of disk_fills: the file system of the run's directory has fewer bytes free.
    disk_free_bytes: Count = 5 * 1024**3
    # Limit of redis_fills: Redis uses a larger share of its memory limit, or of its host's memory if it has no limit.
    redis_share: AlarmShare = 0.9
    # Environment variable of the trainer with the URL that each alarm is posted to as JSON; none is posted by default. The URL is not
    # in the recipe because such URLs are secrets.
    webhook_env: VariableName = ""
    # Alarms that end the run in good order when they begin, as in ["entropy_collapses"]; a resume goes on.
    stop_on: tuple[AlarmKind, ...] = ()

    @property
    def kinds_off(self) -> frozenset[AlarmKind]:
        """The alarms whose limit is 0."""
        limits: dict[AlarmKind, float] = {
            "success_falls": self.success_drop,
            "gap_grows": self.gap_growth,
            "lag_saturates": self.lag_share,
            "signal_is_masked": self.masked_signal_share,
            "format_errors_rise": self.format_error_rise,
            "format_errors_prevail": self.format_error_share,
            "trees_rise": self.tree_rise,
            "entropy_collapses": self.entropy_share,
            "judge_is_gamed": self.judge_gaming,
            "disk_fills": self.disk_free_bytes,
            "redis_fills": self.redis_share,
        }
        return frozenset(kind for kind, limit in limits.items() if not limit)


class PlanRecipe(Table, frozen=True, kw_only=True):
    """Hardware and episodes that the run is planned for. Only the plan reads this table: [plan.md](plan.md)."""

    # GPUs of the run, as in "16xH100-80", or the learner's and the engines', as in "8xH100-80+16xL40S-48".
    gpus: Line = ""
    learner_gpus: Count = 0  # number of GPUs for the learner; 0 means half of those that are not reserved
    reserved_gpus: Count = 0  # number of GPUs for other models, such as a judge's
    gpus_per_node: PositiveCount = 8  # number of GPUs of one machine
    node_memory_gib: PositiveCount = 1024  # host memory of a machine with GPUs
    engine_gpus: PositiveCount = 1  # number of GPUs of one engine, its --tensor-parallel
    # Share of a GPU's memory for weights and KV cache: SGLang's --mem-fraction-static.
    engine_memory_share: PartShare = 0.85
    # Hosts of the sandboxes: their number and the cores of one, as in "4x64", or with its memory in GiB, as in "4x64x256".
    hosts: Line = ""
    slots_per_core: PositiveAmount = 1.0  # number of episodes at once for each core of a host
    # Share of its peak speed that a GPU reaches while it trains, with what recomputation repeats. The default is between 0.2 and 0.4, and
    # for a mixture of experts between 0.05 and 0.15, whose products have few rows each. Both are assumptions.
    utilisation: PartShare | None = None
    # Speed at which one machine reads or writes the file system of the run directory.
    storage_gib_per_s: PositiveAmount = 2.0
    # Speed at which one machine sends to others over the network that weights take.
    network_gib_per_s: PositiveAmount = 2.0
    # Length of an episode's last context, prompt and observations included; half of rollout.limits.context_tokens by default.
    episode_tokens: PositiveCount | None = None
    # Number of turns of an episode; half of rollout.limits.turns by default.
    episode_turns: PositiveCount | None = None
    # Number of tokens that the policy samples in an episode; 30 % of episode_tokens by default.
    episode_sampled_tokens: PositiveCount | None = None
    # Time of an episode from claim to verdict; by default it is computed from the engines' speed, command_s and grade_s.
    episode_s: PositiveSeconds | None = None
    command_s: PositiveSeconds = 3.0  # time of one turn's command in the sandbox
    grade_s: PositiveSeconds = 120.0  # time of starting containers and grading


class Recipe(Table, frozen=True, kw_only=True):
    """Keys of the run as a whole. Relative paths are relative to the recipe's own directory."""

    # Kind of the recipe. "rl": reinforcement learning, whose keys follow. "sft": supervised fine-tuning, whose keys are at the end.
    kind: Literal["rl"] = "rl"
    name: RunName  # first part of the run's id
    model: PathText  # directory of the starting policy, in the format of Hugging Face
    num_steps: PositiveCount  # number of optimizer steps of the run
    tasks: TaskFiles = TaskFiles()
    # Sources of training tasks, in place of tasks.train: [tasks.md](tasks.md#several-sources-of-tasks). The keys that a source does not
    # give are as in `[rollout]`, and held-out tasks are played as that says.
    sources: tuple[SourceRecipe, ...] = ()
    rollout: Rollout
    batch: BatchRecipe
    learner: LearnerConfig
    seed: Count = 0  # seed of the order of the tasks, of the choice of held-out tasks and audited samples, and of a judge's votes
    curriculum: CurriculumRecipe = CurriculumRecipe()
    chat: ChatRecipe = ChatRecipe()
    grading: GradingRecipe = GradingRecipe()
    credit: CreditRecipe = CreditRecipe()
    judge: JudgeRecipe = JudgeRecipe()
    overlong: OverlongRecipe = OverlongRecipe()
    admission: AdmissionRecipe = AdmissionRecipe()
    weights: WeightsRecipe = WeightsRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    audit: AuditRecipe = AuditRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    rollouts: RolloutsRecipe = RolloutsRecipe()
    sinks: SinksRecipe = SinksRecipe()
    alarms: AlarmsRecipe = AlarmsRecipe()
    plan: PlanRecipe = PlanRecipe()

    @property
    def by_source(self) -> dict[str, "Recipe"]:
        """The recipe as it is for the groups of each source, by the source's name; where tasks.train is given, itself, under "".

        Raises ValueError for a key of a source that `[rollout]` does not have, or not with this value.
        """
        return {source.name: self._of(source) for source in self.sources} or {"": self}

    def _of(self, source: SourceRecipe) -> "Recipe":
        tree = _overlaid(msgspec.to_builtins(self.rollout), source.changes)
        try:
            rollout = msgspec.convert(tree, Rollout)
        except msgspec.ValidationError as error:
            raise ValueError(f"sources.{source.name}.{refusal(error, tree, Rollout)}") from error
        return replace(self, rollout=rollout, tasks=replace(self.tasks, train=source.tasks), sources=())

    @property
    def min_valid_members(self) -> int:
        return self.min_valid_of(self.rollout.group_size)

    def min_valid_of(self, group_size: int) -> int:
        """The number of graded members that a group of this size needs to be trained."""
        fewest = 1 if self.credit.method == "distill" else 2  # a baseline needs two
        return self.batch.min_valid_members or max(fewest, math.ceil(group_size / 2))

    @property
    def largest_group_size(self) -> int:
        """The largest number of members that a group of any source may have."""
        largest = self.curriculum.max_group_size
        return largest or max(one.rollout.group_size for one in self.by_source.values())

    @property
    def trains_without_signal(self) -> bool:
        """Whether groups whose rewards are all equal are trained, too."""
        return self.batch.train_without_signal or self.credit.distills

    @property
    def group_deadline_s(self) -> float:
        limits, deadline_s = self.rollout.limits, self.rollout.group_deadline_s
        return limits.wall_s + limits.grade_wall_s if deadline_s is None else deadline_s

    def refills_of(self, group_size: int) -> int:
        """The number of members of a group of this size that may be enqueued again."""
        refills = self.rollout.group_refills
        return group_size // 2 if refills is None else refills
