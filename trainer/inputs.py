"""What a recipe names, read and checked before anything is started: tasks, agent, tokenizer.

Tasks that the grader was not seen to judge rightly are refused unless the recipe says otherwise: see `python -m
workers.verify`.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.task import Task
from pipeline.taskfile import Verification, fingerprint, read_tasks, read_verified, verified_path
from pipeline.tokenizer import TokenizerBundle, read_bundle
from trainer.recipe import Recipe, TaskFiles


@dataclass(frozen=True, slots=True)
class Inputs:
    train: list[Task]
    heldout: list[Task]
    agent_config: str
    tokenizer: TokenizerBundle
    num_unverified: int  # of all tasks; above 0 only where the recipe allows it


def read_inputs(recipe: Recipe) -> Inputs:
    """Raises ValueError naming the recipe's field whose file is missing, empty, or at odds with another."""
    files = recipe.tasks
    train = _tasks("tasks.train", files.train)
    heldout = _tasks("tasks.heldout", files.heldout) if files.heldout else []
    shared = {task.id for task in train} & {task.id for task in heldout}
    if shared:
        raise ValueError(
            f"tasks.heldout shares {len(shared)} tasks with tasks.train, such as {min(shared)}; part them"
        )
    inputs = Inputs(
        train=train,
        heldout=heldout,
        agent_config=_text("rollout.agent", recipe.rollout.agent),
        tokenizer=read_bundle(Path(recipe.model)),
        num_unverified=_num_unverified(files, train, heldout),
    )
    _check_context(recipe)
    evaluation, num_heldout = recipe.evaluation, len(inputs.heldout)
    needed = max(evaluation.episodes // evaluation.samples_per_task, evaluation.greedy_episodes)
    if num_heldout < needed:
        raise ValueError(
            f"tasks.heldout holds {num_heldout} tasks, the evaluation plays {needed}; "
            "lower evaluation.episodes or greedy_episodes"
        )
    return inputs


def describe(recipe: Recipe, inputs: Inputs) -> str:
    """The plan of a run in a few lines."""
    groups, size = recipe.batch.groups_per_step, recipe.rollout.group_size
    evaluation, total = recipe.evaluation, recipe.num_steps * groups
    open_at_most = min((recipe.admission.max_lag_versions + 1) * groups, total)
    episodes = evaluation.episodes + evaluation.greedy_episodes
    return "\n".join(
        (
            f"plan: {recipe.num_steps} steps x {groups} groups x {size} rollouts = {total * size} trained "
            "rollouts at most, and as many more as groups without signal are replaced",
            f"tasks: {len(inputs.train)} to train on ({total / len(inputs.train):.1f} epochs), "
            f"{len(inputs.heldout)} held out; {_verified_words(recipe, inputs)}",
            f"admission: at most {open_at_most} groups ({open_at_most * size} rollouts) open, "
            f"so that none is trained more than {recipe.admission.max_lag_versions} versions late",
            f"group: {recipe.min_valid_members} of {size} members must be graded; it closes {recipe.group_deadline_s:.0f} s "
            f"after its first claim if they are, and up to {recipe.group_refills} that broke are asked for again",
            f"evaluation: {episodes} held-out episodes each time" if episodes else "evaluation: none",
            f"checkpoint: every {recipe.checkpoint.every_steps} steps; trajectories are acknowledged then",
        )
    )


def _tasks(field: str, path: str) -> list[Task]:
    try:
        tasks = read_tasks(Path(path))
    except OSError as error:
        raise ValueError(
            f"{field}: {path}: {error.strerror}; make it with `python -m trainer.tasksets`"
        ) from error
    if not tasks:
        raise ValueError(f"{field}: {path} holds no task; a run needs one at least")
    return tasks


def _num_unverified(files: TaskFiles, train: list[Task], heldout: list[Task]) -> int:
    """How many tasks are not verified as they are. Raises ValueError unless `files.unverified` allows it."""
    num_unverified = 0
    for field, path, tasks, allowed in (
        ("tasks.train", files.train, train, ["allow"]),
        ("tasks.heldout", files.heldout, heldout, ["heldout", "allow"]),
    ):
        doubts = _doubts(Path(path), tasks)
        num_unverified += len(doubts)
        if doubts and files.unverified not in allowed:
            first, doubt = next(iter(doubts.items()))
            raise ValueError(
                f"{field}: {len(doubts)} of the {len(tasks)} tasks in {path} are not verified; the first, {first}, "
                f"{doubt}. Run `python -m workers.verify {path}` (--passing FILE copies the tasks that are ok), or "
                f"set tasks.unverified to {' or '.join(map(repr, allowed))}"
            )
    return num_unverified


def _doubts(path: Path, tasks: list[Task]) -> dict[str, str]:
    """Why nobody knows that the grader judges them rightly, by the ids of those tasks."""
    if not tasks:
        return {}
    verified = verified_path(path)
    known = read_verified(verified) if verified.exists() else {}
    return {task.id: doubt for task in tasks if (doubt := _doubt(task, known.get(task.id)))}


def _doubt(task: Task, known: Verification | None) -> str:
    if known is None:
        return "was never verified"
    if known.fingerprint != fingerprint(task):
        return "has changed since it was verified"
    return "" if known.ok else f"was found wrong ({known.reason})"


def _verified_words(recipe: Recipe, inputs: Inputs) -> str:
    if not inputs.num_unverified:
        return "all verified"
    return f'{inputs.num_unverified} not verified, as tasks.unverified = "{recipe.tasks.unverified}" allows'


def _text(field: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{field}: {path}: {error.strerror}; give the agent's YAML file") from error


def _check_context(recipe: Recipe) -> None:
    class _Config(msgspec.Struct):
        max_position_embeddings: int

    config = msgspec.json.decode((Path(recipe.model) / "config.json").read_bytes(), type=_Config)
    if recipe.rollout.limits.context_tokens > config.max_position_embeddings:
        raise ValueError(
            f"rollout.limits.context_tokens is {recipe.rollout.limits.context_tokens}; the model holds "
            f"{config.max_position_embeddings}: lower it"
        )
