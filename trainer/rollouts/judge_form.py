"""What every judge request of a run has in common, read from what `[judge]` names before anything is started."""

from dataclasses import dataclass
from pathlib import Path

from arq.connections import ArqRedis
from msgspec.structs import asdict, replace

from pipeline.judge import Judge
from pipeline.judge_templates import parse_templates, read_templates
from pipeline.request import Endpoint
from pipeline.tokenizer import TokenizerBundle, put_tokenizer, read_bundle
from trainer.recipe import JudgeRecipe, Recipe


@dataclass(frozen=True, slots=True)
class JudgeForm:
    """A judge whose tokenizer may not be in Redis yet."""

    judge: Judge  # names no tokenizer
    tokenizer: TokenizerBundle | None

    async def announced(self, redis: ArqRedis) -> Judge:
        """The judge as requests carry it, with its tokenizer in Redis."""
        if self.tokenizer is None:
            return self.judge
        return replace(self.judge, tokenizer=await put_tokenizer(redis, self.tokenizer))


def read_judge(recipe: Recipe) -> JudgeForm | None:
    """The judge of a recipe; None if it has none. Raises ValueError naming the field whose file is missing or unusable."""
    given = recipe.judge
    if given.method == "none":
        return None
    endpoint = Endpoint(**asdict(given.endpoint)) if given.endpoint.api_base else None
    templates = _templates(given.templates)
    if endpoint is not None and parse_templates(templates).opening.source:
        raise ValueError(
            f"judge.templates: {given.templates}: opening: an endpoint cannot be told how its reply begins; remove `opening`, "
            "or judge with engines behind SWERVE_JUDGE_ROUTER_URL"
        )
    judge = Judge(
        method=given.method,
        name=given.name,
        templates=templates,
        num_votes=given.num_votes,
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        prompt_tokens=given.prompt_tokens,
        history_steps=given.history_steps,
        seed=recipe.seed,
        vote_s=given.vote_s,
        score_format_errors=given.score_format_errors,
        score_submission=given.score_submission,
        endpoint=endpoint,
    )
    return JudgeForm(judge, _tokenizer(given.tokenizer))


def judge_words(judge: JudgeRecipe) -> str:
    """The judge's part of the plan of a run."""
    if judge.method == "none":
        return "none"
    name = f" {judge.name}" if judge.name else ""
    votes = f", {judge.num_votes} votes on each step" if judge.method == "votes" else ""
    where = f", by {judge.endpoint.model} at {judge.endpoint.api_base}" if judge.endpoint.api_base else ""
    waits = (
        "a group waits for its judgements whatever happens, and none is enqueued while no judge works"
        if judge.required
        else f"a group that is ready waits up to {judge.wait_s:.0f} s for its judgements"
    )
    return f"{judge.method}{name}{votes}{where}; {waits}"


def _templates(path: str) -> str:
    try:
        return read_templates(Path(path)) if path else ""
    except ValueError as error:
        raise ValueError(f"judge.templates: {error}") from error


def _tokenizer(directory: str) -> TokenizerBundle | None:
    if not directory:
        return None
    try:
        return read_bundle(Path(directory))
    except ValueError as error:
        raise ValueError(f"judge.tokenizer: {error}") from error
