"""`python -m trainer.plan RECIPE.toml --gpus 16xH100-80 --hosts 4x64`: whether a run fits its machines, and how fast it will be.

It reads the recipe and the model's `config.json`, and starts nothing; tasks, weights and torch are not needed. Exit status: 0 everything
fits; 2 something does not fit, with changes that would make it fit, or misuse.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from pipeline.task import Resources
from trainer import process
from trainer.plan.division import num_parameters
from trainer.plan.engines import EnginePlan
from trainer.plan.launch import WAYS, launch_text
from trainer.plan.planning import Need, RunPlan, gib, make_plan, misfits
from trainer.plan.remedies import Balance, Remedy, are_engines_idle, balances, is_learner_idle, remedies
from trainer.recipe import PlanRecipe, Recipe, load_recipe
from trainer.recipe.wording import meanings


def describe(plan: RunPlan) -> str:
    lines = (
        *_model_lines(plan),
        *_learner_lines(plan),
        *_engine_lines(plan),
        *_episode_lines(plan),
        *_program_lines(plan),
        *_judge_lines(plan),
        *_storage_lines(plan),
    )
    return "\n".join(lines)


def misfit_sentence(need: Need, remedies: Sequence[Remedy]) -> str:
    if not remedies:
        return f"{need}. No change that the planner knows saves anything: give more or larger machines"
    return f"{need}. Tried: {'; '.join(map(str, remedies))}"


def verdict(plan: RunPlan, tried: Sequence[Balance]) -> str:
    """Says, for a plan that fits, whether learner or engines are idle, why, and which changes to the plan the planner has tried."""
    slow, fast = plan.slow, plan.fast
    if is_learner_idle(plan):
        # The smallest bound limits the episodes; if it lets enough of them run, the engines are too slow.
        bound = min(plan.bounds, key=lambda name: plan.bounds[name])
        idle = (
            f"the learner waits {_range(slow.waiting, fast.waiting, form='.0%')} of the time for episodes, of which "
            f"{fast.demand.num_possible:,} are possible at once, by {bound}"
        )
    elif are_engines_idle(plan):
        shares = (1 - one.num_running / plan.episodes_held for one in (fast, slow))
        idle = f"the engines wait for the learner: {_range(*shares, form='.0%')} of the episodes that they could hold never run"
    else:
        return "everything fits"
    if not tried:
        return f"everything fits, but {idle}. No division of the GPUs, hosts or engines that the planner knows shortens a step"
    return f"everything fits, but {idle}. Tried: {'; '.join(_balance_words(plan, one) for one in tried)}"


def _balance_words(plan: RunPlan, balance: Balance) -> str:
    slow, fast = balance.plan.slow, balance.plan.fast
    first, *rest = map(str, balance.changes)
    others = f" with {' and '.join(rest)}" if rest else ""
    return (
        f"{first}{others}: a step takes {_range(fast.step_s, slow.step_s)} s in place of "
        f"{_range(plan.fast.step_s, plan.slow.step_s)} s, and the learner waits {_range(slow.waiting, fast.waiting, form='.0%')} of it"
    )


def _model_lines(plan: RunPlan) -> Iterator[str]:
    architecture = plan.architecture
    where = "its config.json" if plan.is_model_here else "the published config.json of that name"
    yield (
        f"model: {architecture.family}, {num_parameters(architecture) / 1e9:,.2f} billion parameters, {architecture.num_layers} layers, "
        f"as {where} has it"
    )


def _learner_lines(plan: RunPlan) -> Iterator[str]:
    rank, division, config = plan.rank, plan.division, plan.recipe.learner
    yield (
        f"learner: {plan.gpus.learner}: tensor {division.tensor} x pipeline {division.pipeline} x context "
        f"{division.context} x data {division.data}{_expert_words(plan)}, recompute {config.recompute}, micro-batches of "
        f"{config.micro_batch_tokens:,} positions"
    )
    yield (
        f"  a GPU: weights {gib(rank.weights)}, gradients {gib(rank.gradients)}, optimizer {gib(rank.optimizer)}, activations "
        f"{gib(rank.activations)}, logits {gib(rank.logits)}; in the update {gib(rank.update)} in place of the last "
        f"two: {gib(rank.gpu_bytes)} of {gib(plan.usable_gpu_bytes)}"
    )
    yield (
        f"  its host: snapshots {gib(rank.host_snapshots)}, optimizer {gib(rank.host_optimizer)}, undoing a step "
        f"{gib(rank.host_undo)}, checkpoint {gib(rank.host_checkpoint)}; a machine {gib(plan.node_host_bytes)} of "
        f"{plan.recipe.plan.node_memory_gib:,} GiB"
    )
    if rank.senders:
        yield f"  the first GPU besides: {gib(rank.senders)} of the processes that broadcast weights to the engines, in that sum"
    step = plan.step
    yield (
        f"  a step: {step.num_tokens:,} positions, {step.flops / 1e15:,.1f} PFLOP, {_range(step.fast_s, step.slow_s)} s at "
        f"{_range(step.utilisation(step.slow_s), step.utilisation(step.fast_s), form='.0%')} of the peak without what is repeated, "
        f"{_range(step.num_tokens / step.slow_s, step.num_tokens / step.fast_s)} tokens/s{_assumption_words(plan)}"
    )
    if step.sent_bytes:
        yield (
            f"  to experts of other GPUs and back: a GPU sends {gib(step.sent_bytes)} in a step, {gib(step.sent_to_machines_bytes)} of it "
            "to other machines"
        )


def _assumption_words(plan: RunPlan) -> str:
    if plan.recipe.plan.utilisation is not None:
        return ""
    return " (assumed; plan.utilisation takes what you have measured)"


def _range(least: float, most: float, *, form: str = ",.0f") -> str:
    """Both ends of the range, or one if they print the same."""
    low, high = f"{least:{form}}", f"{most:{form}}"
    return low if low == high else f"{low} to {high}"


def _expert_words(plan: RunPlan) -> str:
    return f" (expert {plan.division.expert})" if plan.architecture.experts else ""


def _engine_lines(plan: RunPlan) -> Iterator[str]:
    engines, limits = plan.engines, plan.recipe.rollout.limits
    precision = " in FP8" if plan.recipe.weights.precision == "fp8" else ""
    yield (
        f"engines: {engines.num_engines} of {engines.gpus_per_engine} x {engines.gpus.device.name}: weights "
        f"{gib(engines.weight_bytes)}{precision} of {gib(engines.usable_bytes)} a GPU, "
        f"KV cache {engines.kv_bytes_per_token / 1024:,.0f} KiB a token, {engines.kv_tokens:,} tokens an engine"
        + (f"; linear attention {gib(engines.state_bytes)} a request" if engines.state_bytes else "")
    )
    yield (
        f"  all hold {engines.episodes_held(int(plan.length.tokens)):,} episodes of mean length, "
        f"{engines.episodes_held(limits.context_tokens):,} of {limits.context_tokens:,} tokens{_left_words(plan, engines)}"
    )
    published = plan.publication
    yield (
        f"publication by {plan.recipe.weights.transport}: {gib(published.num_bytes)} a version, {published.export_s:,.1f} s from the "
        f"GPUs to files, {gib(published.sent_bytes)} sent, {published.load_s:,.1f} s until the last engine has it"
    )


def _left_words(plan: RunPlan, engines: EnginePlan) -> str:
    left = engines.gpus.count - engines.num_engines * engines.gpus_per_engine
    reserved = plan.gpus.num_reserved
    words = [f"{left} GPUs are left over"] if left else []
    words += [f"{reserved} GPUs are reserved"] if reserved else []
    return "".join(f"; {word}" for word in words)


def _episode_lines(plan: RunPlan) -> Iterator[str]:
    length, slow, fast = plan.length, plan.slow, plan.fast
    seconds = sorted((slow.demand.episode_s, fast.demand.episode_s))
    yield (
        f"episodes: {length.turns:,.0f} turns, {length.tokens:,.0f} tokens, {length.sampled_tokens:,.0f} of them sampled "
        f"({length.source}); {_range(*seconds)} s each"
    )
    yield f"  {_needed_words(plan)}; {fast.demand.num_possible:,} are possible: {_bound_words(plan)}"
    if fast.waiting > 0.01:
        yield (
            f"  so a step takes {_range(fast.step_s, slow.step_s)} s, and the learner waits "
            f"{_range(slow.waiting, fast.waiting, form='.0%')} of the time"
        )
    fleet = plan.fleet
    if fleet is None:
        yield "sandboxes: give --hosts, as in --hosts 4x64, to plan slots and their memory"
        return
    hosts = fleet.hosts
    yield (
        f"sandboxes: {hosts.count} host{'s' if hosts.count > 1 else ''} x {fleet.slots_per_host} slots = {fleet.num_slots:,}; "
        f"containers may use {gib(fleet.container_bytes)} each, {gib(fleet.slots_per_host * fleet.container_bytes)} of "
        f"{gib(hosts.memory_bytes)} a host{_hosts_words(plan)}"
    )


def _program_lines(plan: RunPlan) -> Iterator[str]:
    """The agent program's use of each episode's context and container, and of the hosts' cores."""
    if plan.program is None:
        return
    footprint, limits = plan.program.footprint, plan.recipe.rollout.limits
    yield (
        f"program: {plan.program.name} {plan.program.version}: {footprint.opening_tokens:,} tokens before the task, "
        f"{footprint.opening_tokens / limits.context_tokens:.0%} of the context; {gib(footprint.memory_bytes)} of the "
        f"{gib(Resources().memory_bytes)} that a container may use, {footprint.cpu_s:,.1f} s of CPU an episode{_cores_words(plan)} "
        f"({footprint.source or 'nobody has said where these figures are from'})"
    )


def _cores_words(plan: RunPlan) -> str:
    """The cores of the hosts that the program uses with the plan's number of running episodes."""
    if plan.program is None or plan.fleet is None:
        return ""
    hosts, cpu_s = plan.fleet.hosts, plan.program.footprint.cpu_s
    rates = (one.demand.episodes_per_s * cpu_s for one in (plan.slow, plan.fast))
    return f", {_range(*rates, form='.2f')} of {hosts.count * hosts.cores:,} cores"


def _needed_words(plan: RunPlan) -> str:
    slow, fast = plan.slow.demand.num_needed, plan.fast.demand.num_needed
    if slow and fast:
        return f"{_range(slow, fast)} at once keep the learner busy"
    if slow:
        return f"{slow:,} at once keep a slow learner busy, and no number a fast one"
    return "these engines cannot keep the learner busy, however many run at once"


def _judge_lines(plan: RunPlan) -> Iterator[str]:
    """The work of a judge model of ours for each optimizer step, and its GPUs. A rule or an endpoint needs no GPU."""
    judge, recipe = plan.recipe.judge, plan.recipe
    if judge.method not in ("votes", "reward_model", "teacher") or judge.endpoint.api_base:
        return
    num_rollouts = recipe.rollout.group_size * recipe.batch.groups_per_step
    reserved = plan.gpus.num_reserved
    where = (
        f"on the {reserved} reserved GPUs"
        if reserved
        else "on GPUs that this plan leaves none of: raise plan.reserved_gpus"
    )
    if judge.method == "teacher":
        read = num_rollouts * plan.length.tokens
        yield (
            f"teacher: {judge.name or judge.tokenizer}: {num_rollouts:,} rollouts a step, {read:,.0f} prompt tokens, "
            f"{read / plan.fast.step_s:,.0f} a second to keep up, {where}"
        )
        return
    num_turns = num_rollouts * plan.length.turns
    num_votes = judge.num_votes if judge.method == "votes" else 0
    sampled = num_turns * num_votes * judge.max_new_tokens
    yield (
        f"judge: {judge.name or judge.method}: {num_turns:,.0f} turns a step, {num_votes} votes on each; at most "
        f"{num_turns * judge.prompt_tokens:,.0f} prompt tokens and {sampled:,.0f} sampled ones, {sampled / plan.fast.step_s:,.0f} a "
        f"second to keep up, {where}"
    )


def _bound_words(plan: RunPlan) -> str:
    return ", ".join(f"{count:,} by {bound}" for bound, count in plan.bounds.items())


def _hosts_words(plan: RunPlan) -> str:
    fleet, wanted = plan.fleet, plan.fast.demand if plan.fast.demand.num_needed else plan.slow.demand
    if fleet is None or not wanted.num_needed:
        return ""
    hosts = fleet.hosts_for(wanted.num_needed)
    return f"; for {wanted.num_needed:,} at once: {hosts:,} such hosts"


def _storage_lines(plan: RunPlan) -> Iterator[str]:
    storage, recipe = plan.storage, plan.recipe
    yield (
        f"Redis: {gib(storage.redis_bytes)} of {gib(recipe.admission.max_queue_bytes)} just before a checkpoint, at "
        f"{storage.trajectory_bytes / 1e3:,.0f} kB a trajectory; give it twice that as maxmemory"
    )
    yield f"trainer's memory: {gib(storage.held_bytes)} of {gib(recipe.admission.max_held_bytes)} for trajectories until their step"
    yield (
        f"disk: {gib(storage.disk_bytes)} in all: {recipe.checkpoint.keep + 1} checkpoints of {gib(storage.checkpoint_bytes)}, "
        f"{recipe.weights.keep + 1} versions of {gib(storage.weights_bytes)}"
        + (f" and their base of {gib(storage.base_bytes)}" if storage.base_bytes else "")
        + f", rollouts {gib(storage.rollouts_bytes)}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that override the recipe's table [plan]."""
    group = parser.add_argument_group(
        "plan", "what the run is planned for; the default is the recipe's [plan]"
    )
    texts = meanings(PlanRecipe)
    group.add_argument("--gpus", metavar="GPUS", help=texts["gpus"])
    group.add_argument("--hosts", metavar="HOSTS", help=texts["hosts"])
    group.add_argument(
        "--measured",
        type=Path,
        metavar="RUN_DIR",
        help="a run whose episodes show how long episodes are; by default they are as [plan] says or as the limits suggest",
    )


def planned(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """`recipe` with the machines that the arguments name."""
    given = {name: value for name in ("gpus", "hosts") if (value := getattr(arguments, name))}
    return replace(recipe, plan=replace(recipe.plan, **given))


def print_plan(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Prints the plan. Raises ValueError if nothing can be planned and, after printing, if something does not fit."""
    measured: Path | None = arguments.measured
    plan = make_plan(planned(recipe, arguments), measured=measured)
    if recipe.sources:
        print("sources: [rollout] is counted with the largest groups, contexts and numbers of turns of all")
    print(describe(plan))
    if fault := faults(plan, measured):
        raise ValueError(fault)
    print(verdict(plan, balances(plan, measured=measured)))


def print_launch(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Prints the commands that start the run. Raises ValueError if something does not fit."""
    plan = make_plan(planned(recipe, arguments), measured=arguments.measured)
    if fault := faults(plan, arguments.measured):
        raise ValueError(fault)
    print(launch_text(plan, arguments.recipe, arguments.launch))


def faults(plan: RunPlan, measured: Path | None = None) -> str:
    """Everything that does not fit, each with changes that would make it fit; empty if everything fits."""
    return "; ".join(misfit_sentence(need, remedies(plan, need, measured=measured)) for need in misfits(plan))


def main(argv: list[str] | None = None) -> int:
    parser = process.recipe_parser("trainer.plan", __doc__, example="learner.recompute=full")
    add_arguments(parser)
    parser.add_argument(
        "--launch", choices=WAYS, help="print the commands that start the planned run, instead of the plan"
    )
    arguments = parser.parse_args(argv)
    return process.exit_status(lambda settings: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.set)
    if arguments.launch:
        print_launch(recipe, arguments)
    else:
        print_plan(recipe, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
