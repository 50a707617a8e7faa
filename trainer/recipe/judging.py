"""The table `[judge]` of a recipe: who scores the steps of finished rollouts, and how long training waits for it."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from pipeline.judge import JudgeMethod
from trainer.recipe.table import Table


class JudgeEndpointRecipe(Table, frozen=True, kw_only=True):
    """An OpenAI-compatible server that writes the votes, instead of engines behind the judges' own router."""

    api_base: str = ""  # such as "http://host:30000/v1"; by default the judges' router
    model: str = ""  # as the server names it
    key_env: str = ""  # environment variable of the judge workers that holds the server's key
    key_file: str = ""  # file on the judge workers' hosts that holds the server's key
    # Further fields of the request's body.
    options: dict[str, str | int | float | bool] = msgspec.field(
        default_factory=dict[str, str | int | float | bool]
    )


class JudgeRecipe(Table, frozen=True, kw_only=True):
    """A judge that scores each step of a finished rollout, from -1 to 1: see [judge.md](judge.md).

    `python -m workers.judge` carries it out, beside the workers and without their sandboxes. What a score is worth is
    said in `[credit]`.
    """

    # How steps are scored. votes: a language model writes a verdict, several times. reward_model: a model with one scalar output.
    # rule: a rule that needs no model. function: a Python function that the judge workers' operator provides. none: there is no judge.
    method: Literal["none"] | JudgeMethod = "none"
    # Name of the rule or function; of a model, for people.
    name: str = ""
    # YAML file with the judge's prompts; by default the built-in ones.
    templates: str = ""
    # Hugging Face directory of the judge's model, for its tokenizer and chat template; an endpoint can do without.
    tokenizer: str = ""
    num_votes: int = 3  # on each step, with a seed each
    temperature: float = 1.0  # of a vote
    max_new_tokens: int = 2048  # that one vote may sample
    # That one prompt may have; without a tokenizer, a token counts as 3 characters.
    prompt_tokens: int = 16384
    history_steps: int = 8  # earlier steps that a prompt shows
    vote_s: float = 300.0  # time after which one vote counts as failed
    score_format_errors: bool = False  # score the turns whose reply held no command, too
    score_submission: bool = False  # score the turn that submitted, too
    endpoint: JudgeEndpointRecipe = JudgeEndpointRecipe()
    # How long a group that is ready for its step waits for its judgements. After that it is trained with those that it has. It does not
    # wait while no judge works, nor if it would be trained more than admission.max_lag_versions late.
    wait_s: float = 600.0
    # A group waits for its judgements whatever happens, and no group is enqueued while no judge works.
    required: bool = False

    @property
    def is_on(self) -> bool:
        return self.method != "none"


def judge_faults(judge: JudgeRecipe) -> Iterator[str]:
    """What is wrong with the table, each fault with its fix."""
    if judge.method == "none":
        if judge != JudgeRecipe():
            yield 'judge.method is "none", so the other keys of [judge] have no effect: set it, or remove them'
        return
    yield from _range_faults(judge)
    named, endpoint = judge.method in ("rule", "function"), judge.endpoint
    if named and not judge.name:
        example = "commands" if judge.method == "rule" else "my_judge"
        yield f'judge.name is missing; judge.method = "{judge.method}" needs the name of one, as in "{example}"'
    if endpoint != JudgeEndpointRecipe() and judge.method != "votes":
        yield f'judge.endpoint is of use with judge.method = "votes" only: remove it, or set that instead of "{judge.method}"'
    if endpoint.api_base and not endpoint.api_base.startswith(("http://", "https://")):
        yield f'judge.endpoint.api_base is "{endpoint.api_base}"; give a URL, as in "http://127.0.0.1:30000/v1"'
    if endpoint.api_base and not endpoint.model:
        yield "judge.endpoint.model is missing; give the model's name as the server at judge.endpoint.api_base knows it"
    if not endpoint.api_base and endpoint != JudgeEndpointRecipe():
        yield "judge.endpoint.api_base is missing; give the server's URL, or remove [judge.endpoint]"
    if endpoint.key_env and endpoint.key_file:
        yield "judge.endpoint.key_env and judge.endpoint.key_file are both given; remove one of them"
    if not named and not endpoint.api_base and not judge.tokenizer:
        yield (
            "judge.tokenizer is missing; give the Hugging Face directory of the judge's model, whose tokenizer cuts the prompts, "
            "or judge.endpoint.api_base"
        )


def _range_faults(judge: JudgeRecipe) -> Iterator[str]:
    if not 1 <= judge.num_votes <= 64:
        yield f"judge.num_votes is {judge.num_votes}; it must lie between 1 and 64"
    if judge.temperature < 0:
        yield f"judge.temperature is {judge.temperature:g}; it must be 0 or more"
    if judge.temperature == 0 and judge.num_votes > 1 and judge.method == "votes":
        yield (
            f"judge.temperature is 0, so all {judge.num_votes} votes on a step are the same: raise it, or set judge.num_votes to 1"
        )
    for name in ("max_new_tokens", "prompt_tokens"):
        if getattr(judge, name) < 1:
            yield f"judge.{name} is {getattr(judge, name)}; it must be 1 or more"
    if judge.history_steps < 0:
        yield f"judge.history_steps is {judge.history_steps}; it must be 0 or more"
    if judge.vote_s <= 0:
        yield f"judge.vote_s is {judge.vote_s:g}; it must be above 0"
    if judge.wait_s < 0:
        yield f"judge.wait_s is {judge.wait_s:g}; it must be 0 or more"
