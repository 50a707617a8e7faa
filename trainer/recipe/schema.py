"""Every key of a recipe: its type, its default, and, as the comment behind or above it, its meaning.

`python -m trainer.recipe --reference` makes docs/recipe.md of these comments, so they are written for users. Tables that also
travel in requests (`pipeline.request`) and the learner's (`trainer.learner.config`) are defined there.
"""

import math
from typing import Any, Literal

import msgspec

from pipeline.reply_format import CallFormat, ThoughtFormat
from pipeline.request import Budget, Context, Limits, Retries, Sampling
from trainer.learner.config import LearnerConfig
from trainer.recipe.alarms import AlarmsRecipe
from trainer.recipe.credit import CreditRecipe
from trainer.recipe.judging import JudgeRecipe
from trainer.recipe.overlong import OverlongRecipe
from trainer.recipe.sinks import SinksRecipe
from trainer.recipe.table import Table

AdvantageKind = Literal["leave_one_out", "group_mean", "group_mean_std"]
Stragglers = Literal["wait", "train", "withhold"]
Unverified = Literal["refuse", "heldout", "allow"]
PauseMode = Literal["retract", "in_place", "abort"]
Transport = Literal["disk", "delta", "distributed"]


class SamplingRecipe(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy samples. Training needs top_p = 1 and no top_k, because log-probs are of the full distribution."""


class BudgetRecipe(Budget, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many failures of one class a request may have, and how long it waits after each."""


class RetriesRecipe(Retries, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a failed request is tried again, by class of failure. A class that is given is given in full."""

    # The engine refuses what the policy made of its conversation.
    policy: BudgetRecipe = BudgetRecipe(tries=1)
    # The task's image or setup is broken; set 2 or more tries where hosts hold different images.
    environment: BudgetRecipe = BudgetRecipe(tries=1)
    # Docker, the engine or the network failed.
    infrastructure: BudgetRecipe = BudgetRecipe(tries=5)
    # Grading broke off without a verdict.
    grader: BudgetRecipe = BudgetRecipe(tries=3, first_s=2.0)
    # No worker can carry the request out, or every worker that tries dies.
    poison: BudgetRecipe = BudgetRecipe(tries=1)


class LimitsRecipe(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an episode ends. Deadlines start when a worker claims the request, never in the queue."""

    retries: RetriesRecipe = RetriesRecipe()


class ContextRecipe(Context, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when the next reply may not fit into rollout.limits.context_tokens, and what becomes of earlier thoughts.

    Each turn is trained on exactly the context that it saw, and each sampled token once, whatever is cut.
    """

    # "head_tail": turns are taken out of the middle, the first and the newest stay, and each prompt leaves room for a whole reply.
    # "stop": the episode ends.
    policy: Literal["stop", "head_tail"] = "head_tail"


class TaskFiles(Table, frozen=True, kw_only=True):
    """Task files, made by `python -m trainer.tasksets` and verified by `python -m workers.verify`."""

    train: str  # the tasks to train on, a tasks.jsonl
    heldout: str = ""  # the held-out tasks, another tasks.jsonl; needed for evaluations only
    # Further held-out tasks by name, as in { verified = "verified.jsonl" }. Every evaluation plays each of them too, with as many
    # episodes, or as many as it has tasks for.
    heldout_sets: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # What to do with tasks that are not verified: refuse them, allow them among the held-out tasks only, or allow them.
    unverified: Unverified = "refuse"
    # Leave tasks out of training whose weakness is above this: the share of wrong patches, made of the known fix by verification,
    # that pass all the same. A number from 0 to 1; by default no task is left out for that.
    max_weakness: float | None = None


class GradingRecipe(Table, frozen=True, kw_only=True):
    """How far a pass has to prove itself before it is worth a reward."""

    # How many passes are followed by a control run, in which the same tests must fail because what they expect was made wrong:
    # always, never, or a share of them drawn by chance, above 0 and below 1.
    controls: Literal["always", "never"] | float = "always"

    @property
    def control_share(self) -> float:
        return (
            {"always": 1.0, "never": 0.0}[self.controls] if isinstance(self.controls, str) else self.controls
        )


class Rollout(Table, frozen=True, kw_only=True):
    """What one group of rollouts is: several episodes of one task, whose rewards are compared with each other."""

    group_size: int  # rollouts of one task that share a baseline; 2 or more
    # The agent's file, a YAML of mini-swe-agent 1.x or 2.x; or a list of files and of values such as "agent.step_limit=50", merged in
    # this order. `python -m workers.agent FILE` says what becomes of each key.
    agent: str | tuple[str, ...]
    exact: bool = False  # do as mini-swe-agent does even where our own way is better: docs/agents.md names the differences
    sampling: SamplingRecipe = SamplingRecipe()
    limits: LimitsRecipe = LimitsRecipe()
    context: ContextRecipe = ContextRecipe()
    # Time from a group's first claim until it closes with the members that have arrived, if they are enough; by default
    # limits.wall_s + limits.grade_wall_s.
    group_deadline_s: float | None = None
    # How long a group may wait for its first claim before it is given up as failed; by default for ever.
    queue_s: float | None = None
    # How many members of a group may be enqueued again after an infrastructure failure; by default half of the group.
    group_refills: int | None = None

    @property
    def agent_specs(self) -> tuple[str, ...]:
        """Files and values, in the order in which they are merged."""
        return (self.agent,) if isinstance(self.agent, str) else self.agent


class ChatRecipe(Table, frozen=True, kw_only=True):
    """How messages become the model's text, and its text messages. `python -m pipeline.templates` tries a chat template."""

    template: str = ""  # a chat template in Jinja; by default the model's own
    # Further variables of the chat template, such as enable_thinking = false.
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    # In which form the model writes tool calls; by default recognised by the words of the chat template, and named in the plan.
    tool_calls: CallFormat | None = None
    # Which marks the model writes around its thoughts; by default recognised likewise.
    thoughts: ThoughtFormat | None = None


class StalenessRecipe(Table, frozen=True, kw_only=True):
    """Between which bounds how far admission runs ahead, and what lowers it. A run begins at the lower bound. Only for
    admission.staleness = "controlled".
    """

    least_versions: int = 1  # how far admission may run ahead at least
    most_versions: int | None = None  # how far at most; by default max_lag_versions
    # Tokens of a lag are no longer useful once the effective sample size of their weights is a smaller share of their number, ...
    min_ess_share: float = 0.5
    # ... or the objective masks or vetoes a larger share of them, ...
    max_masked_share: float = 0.2
    # ... or the policy has moved further from the weights that sampled them, in nats per token.
    max_behaviour_kl: float = 0.1
    patience_steps: int = 10  # steps after lowering before it may be raised again


class AdmissionRecipe(Table, frozen=True, kw_only=True):
    """How many groups may be open at once, so that no trajectory is trained too late and no memory runs over."""

    max_lag_versions: int = 4  # how many versions behind the weights of a trained trajectory may be
    # How far admission runs ahead of the steps. fixed: as far as max_lag_versions allows. controlled: within the bounds of
    # admission.control, by what the objective does to stale tokens; max_lag_versions holds all the same.
    staleness: Literal["fixed", "controlled"] = "fixed"
    control: StalenessRecipe = StalenessRecipe()
    # What a step does about a group that would exceed the lag: wait for it, train it late, or leave it out.
    stragglers: Stragglers = "wait"
    # How often open requests are compared with the queue, to find what Redis lost.
    sweep_every_s: float = 10.0
    # Trajectories that Redis may hold until a checkpoint contains them; beyond it, groups are admitted one at a time.
    max_queue_bytes: int = 4 * 1024**3
    # Trajectories that the trainer's memory may hold until their step; beyond it, groups are admitted one at a time.
    max_held_bytes: int = 4 * 1024**3


class BatchRecipe(Table, frozen=True, kw_only=True):
    """Which groups an optimizer step takes, and how their rewards become advantages."""

    groups_per_step: int  # groups that one optimizer step trains
    # A group with fewer graded members is dropped; by default half of the group, and 2 at least.
    min_valid_members: int | None = None
    # The baseline of a reward: the mean of the other members, the mean of the group, or that divided by the standard deviation.
    advantage: AdvantageKind = "leave_one_out"
    # Compute the gradient of groups that are ready while the others of the step are awaited. The sum is the same as of the whole batch
    # but for rounding; needs learner.num_epochs = 1 and learner.num_minibatches = 1.
    streaming: bool = False
    # Train groups whose rewards are all equal, too. Their advantages are 0, but for what the scores of a judge add with [credit].
    train_without_signal: bool = False
    # After so many groups in a row whose rewards were all equal, the run ends: there is nothing left to learn.
    max_groups_without_signal: int = 200
    # After so many groups in a row with too few graded members, the run ends as failing, and can be resumed.
    max_failed_groups: int = 50


class WeightsRecipe(Table, frozen=True, kw_only=True):
    """How weight versions reach the engines."""

    keep: int = 3  # published versions kept on disk
    # What engines do with running requests while weights change: preempt and recompute them, pause them in place, or end them.
    pause: PauseMode = "retract"
    # How weights get to an engine. disk: from the trainer's directory, on a file system that trainer and engines share. delta: the
    # blocks that changed are sent to a receiver on the engine's host, which keeps versions on its local disk. distributed: broadcast
    # by NCCL to engines on GPUs, by gloo to engines on the CPU. See [weights.md](weights.md).
    transport: Transport = "disk"
    receiver_port: int = 30300  # of the receivers, one on each engine host; for transport = "delta"
    # Who gets the weights: every engine that the router knows, or none (they are written to disk only).
    engines: Literal["router", "none"] = "router"
    # Time that one engine may take to load a version. Training does not wait: an engine that is much slower than another is taken out
    # of routing before that, and comes back when it serves the newest version.
    engine_deadline_s: float = 600.0
    # How many engines that get requests may load weights at the same time, so that the others go on sampling; 0: all of them.
    engines_at_once: int = 0


class EvaluationRecipe(Table, frozen=True, kw_only=True):
    """Held-out evaluations during the run. The weights stay the same until one has ended."""

    episodes: int = 0  # episodes sampled as in training; a multiple of samples_per_task
    samples_per_task: int = 1  # how many of those episodes each task gets
    greedy_episodes: int = 0  # episodes at temperature 0, one per task
    before: bool = True  # evaluate the starting weights
    after: bool = True  # evaluate the last weights
    every_steps: int = 0  # evaluate after every so many steps as well; 0: never


class AuditRecipe(Table, frozen=True, kw_only=True):
    """The audit of log-probs: the learner recomputes sampled tokens under the weights that sampled them, and compares."""

    # How much of each step's trained tokens, from 0 to 1; whole samples are drawn by chance. Each costs a forward pass for every weight
    # version in it. Without learner.snapshots_kept there is nothing to compare with.
    share: float = 0.02


class CheckpointRecipe(Table, frozen=True, kw_only=True):
    """Checkpoints of the learner and of the run's accounts. Trajectories are acknowledged when one contains them."""

    every_steps: int = 10  # steps from one checkpoint to the next
    keep: int = 2  # checkpoints kept on disk


class RolloutsRecipe(Table, frozen=True, kw_only=True):
    """What is kept of each rollout in the run's directory, where it outlives Redis: see [rollouts.md](rollouts.md)."""

    # Which rollouts are kept: all, none, or a share of the groups, above 0 and below 1, with every failed rollout.
    keep: Literal["all", "none"] | float = "all"
    # Disk space for them, compressed; beyond it, the oldest are removed.
    max_bytes: int = 64 * 1024**3
    # Keep beside them what each step did with each token that it trained: the learner's log-prob, the advantage, the weight, and why a
    # token had no gradient. About 7 bytes a token.
    tokens: bool = False

    @property
    def keeps_tokens(self) -> bool:
        return self.tokens and self.keep != "none"


class PlanRecipe(Table, frozen=True, kw_only=True):
    """What the run is planned for. Only the plan reads this table: [plan.md](plan.md)."""

    # All GPUs, as in "16xH100-80", or the learner's and the engines', as in "8xH100-80+16xL40S-48".
    gpus: str = ""
    learner_gpus: int = 0  # of them, for the learner; 0: half of those that are not reserved
    reserved_gpus: int = 0  # of them, for other models, such as a judge's
    gpus_per_node: int = 8  # GPUs of one machine
    node_memory_gib: int = 1024  # host memory of a machine with GPUs
    engine_gpus: int = 1  # GPUs of one engine, its --tensor-parallel
    # Of a GPU's memory, for weights and KV cache: SGLang's --mem-fraction-static.
    engine_memory_share: float = 0.85
    # Hosts of the sandboxes and the cores of one, as in "4x64", or with GiB of memory, as in "4x64x256".
    hosts: str = ""
    slots_per_core: float = 1.0  # episodes at once for each core of a host
    # Share of its peak speed that a GPU reaches while it trains, with what recomputation repeats.
    utilisation: float = 0.4
    # How fast one machine reads or writes the file system of the run directory.
    storage_gib_per_s: float = 2.0
    network_gib_per_s: float = 2.0  # how fast one machine sends to others over the network that weights take
    # Tokens of an episode's last context, prompt and observations included; by default half of rollout.limits.context_tokens.
    episode_tokens: int | None = None
    episode_turns: int | None = None  # turns of an episode; by default half of rollout.limits.turns
    # Tokens that the policy samples; by default 30 % of episode_tokens.
    episode_sampled_tokens: int | None = None
    # Time from claim to verdict; by default computed from the engines' speed, command_s and grade_s.
    episode_s: float | None = None
    command_s: float = 3.0  # time of one turn's command in the sandbox
    grade_s: float = 120.0  # time of starting containers and grading


class Recipe(Table, frozen=True, kw_only=True):
    """The run as a whole. Relative paths are relative to the recipe's own directory."""

    name: str  # the first part of the run's id
    model: str  # the Hugging Face directory of the starting policy
    num_steps: int  # optimizer steps of the run
    tasks: TaskFiles
    rollout: Rollout
    batch: BatchRecipe
    learner: LearnerConfig
    seed: int = 0  # of the order of the tasks
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
    def min_valid_members(self) -> int:
        return self.batch.min_valid_members or max(2, math.ceil(self.rollout.group_size / 2))

    @property
    def group_deadline_s(self) -> float:
        limits, deadline_s = self.rollout.limits, self.rollout.group_deadline_s
        return limits.wall_s + limits.grade_wall_s if deadline_s is None else deadline_s

    @property
    def group_refills(self) -> int:
        refills = self.rollout.group_refills
        return self.rollout.group_size // 2 if refills is None else refills
