"""A plan as people read it: one line for each part, and for what does not fit what would make it fit."""

from collections.abc import Iterator, Sequence

from trainer.plan.engines import EnginePlan
from trainer.plan.planning import Need, RunPlan
from trainer.plan.remedies import Remedy
from trainer.plan.storage import gib


def describe(plan: RunPlan) -> str:
    lines = (
        *_model_lines(plan),
        *_learner_lines(plan),
        *_engine_lines(plan),
        *_episode_lines(plan),
        *_judge_lines(plan),
        *_storage_lines(plan),
    )
    return "\n".join(lines)


def misfit_sentence(need: Need, remedies: Sequence[Remedy]) -> str:
    if not remedies:
        return f"{need}. No change that the planner knows saves anything: give more or larger machines"
    return f"{need}. Tried: {'; '.join(map(str, remedies))}"


def _model_lines(plan: RunPlan) -> Iterator[str]:
    architecture = plan.architecture
    where = "its config.json" if plan.is_model_here else "the published config.json of that name"
    num_parameters = plan.engines.weight_bytes * plan.engines.gpus_per_engine / 2
    yield (
        f"model: {architecture.family}, {num_parameters / 1e9:,.2f} billion parameters, {architecture.num_layers} layers, "
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
        f"  its host: snapshots {gib(rank.host_snapshots)}, optimizer {gib(rank.host_optimizer)}, checkpoint in flight "
        f"{gib(rank.host_checkpoint)}; a machine {gib(plan.node_host_bytes)} of {plan.recipe.plan.node_memory_gib:,} GiB"
    )
    step = plan.step
    yield (
        f"  a step: {step.num_tokens:,} positions, {step.flops / 1e15:,.1f} PFLOP, {step.train_s:,.0f} s at "
        f"{step.utilisation:.0%} of the peak without what is repeated, {step.tokens_per_s:,.0f} tokens/s"
    )


def _expert_words(plan: RunPlan) -> str:
    return f" (expert {plan.division.expert})" if plan.architecture.experts else ""


def _engine_lines(plan: RunPlan) -> Iterator[str]:
    engines, limits = plan.engines, plan.recipe.rollout.limits
    yield (
        f"engines: {engines.num_engines} of {engines.gpus_per_engine} x {engines.gpus.device.name}: weights "
        f"{gib(engines.weight_bytes)} of {gib(engines.usable_bytes)} a GPU, KV cache {engines.kv_bytes_per_token / 1024:,.0f} KiB a "
        f"token, {engines.kv_tokens:,} tokens an engine"
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
    length, wanted = plan.length, plan.demand
    yield (
        f"episodes: {length.turns:,.0f} turns, {length.tokens:,.0f} tokens, {length.sampled_tokens:,.0f} of them sampled "
        f"({length.source}); {wanted.episode_s:,.0f} s each"
    )
    needed = (
        f"{wanted.num_needed:,} at once keep the learner busy"
        if wanted.num_needed
        else "these engines cannot keep the learner busy, however many run at once"
    )
    yield f"  {needed}; {wanted.num_possible:,} are possible: {_bound_words(plan)}"
    waiting = 1 - plan.step.train_s / plan.step_s
    if waiting > 0.01:
        yield f"  so a step takes {plan.step_s:,.0f} s, and the learner waits {waiting:.0%} of the time"
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


def _judge_lines(plan: RunPlan) -> Iterator[str]:
    """What a judge that is a model of ours has to do for each optimizer step, and where. A rule or an endpoint needs no GPU."""
    judge, recipe = plan.recipe.judge, plan.recipe
    if judge.method not in ("votes", "reward_model") or judge.endpoint.api_base:
        return
    num_turns = recipe.rollout.group_size * recipe.batch.groups_per_step * plan.length.turns
    num_votes = judge.num_votes if judge.method == "votes" else 0
    sampled = num_turns * num_votes * judge.max_new_tokens
    reserved = plan.gpus.num_reserved
    where = (
        f"on the {reserved} reserved GPUs"
        if reserved
        else "on GPUs that this plan leaves none of: raise plan.reserved_gpus"
    )
    yield (
        f"judge: {judge.name or judge.method}: {num_turns:,.0f} turns a step, {num_votes} votes on each; at most "
        f"{num_turns * judge.prompt_tokens:,.0f} prompt tokens and {sampled:,.0f} sampled ones, {sampled / plan.step_s:,.0f} a "
        f"second to keep up, {where}"
    )


def _bound_words(plan: RunPlan) -> str:
    return ", ".join(f"{count:,} by {bound}" for bound, count in plan.bounds.items())


def _hosts_words(plan: RunPlan) -> str:
    fleet, wanted = plan.fleet, plan.demand
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
        f"{recipe.weights.keep + 1} versions of {gib(storage.weights_bytes)}, rollouts {gib(storage.rollouts_bytes)}"
    )
