"""The table [judge]: what is refused, and what becomes of it."""

import re
from pathlib import Path

import pytest

from tests.trainer.test_recipe import MINIMAL
from trainer.inputs import judge_words, read_judge
from trainer.recipe import CreditRecipe, load_recipe, to_toml

RULE = ("judge.method=rule", "judge.name=commands")
UNREAD = ("credit.method=outcome_then_steps", "credit.coefficient=0")
VOTES = ("judge.method=votes", "judge.tokenizer=judge")
TEACHER = ("judge.method=teacher", "judge.tokenizer=teacher", "judge.required=true")
DISTILL = (*TEACHER, "credit.method=distill", "credit.coefficient=1")


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("judge.required=true",), 'judge.method is "none"'),
        (("judge.method=rule",), "judge.name is missing"),
        (("judge.method=votes",), "judge.tokenizer is missing"),
        ((*VOTES, "judge.num_votes=65"), "judge.num_votes is 65"),
        ((*VOTES, "judge.temperature=0"), "all 3 votes on a step are the same"),
        ((*VOTES, "judge.prompt_tokens=0"), "judge.prompt_tokens is 0"),
        ((*VOTES, "judge.vote_s=0"), "judge.vote_s is 0"),
        ((*RULE, "judge.wait_s=-1"), "judge.wait_s is -1"),
        ((*RULE, "judge.history_steps=-1"), "judge.history_steps is -1"),
        ((*RULE, "judge.endpoint.api_base=http://h/v1"), 'is of use with judge.method = "votes" only'),
        (("judge.method=votes", "judge.endpoint.api_base=host"), "judge.endpoint.api_base"),
        (("judge.method=votes", "judge.endpoint.api_base=http://h/v1"), "judge.endpoint.model is missing"),
        ((*VOTES, "judge.endpoint.model=m"), "judge.endpoint.api_base is missing"),
        ((*RULE, "judge.required=true"), "no group waits for scores that [credit] does not read"),
        (
            ("batch.train_without_signal=true",),
            "batch.train_without_signal is true, and [credit] reads no scores",
        ),
        ((*RULE, "batch.train_without_signal=true", *UNREAD), "[credit] reads no scores"),
        (
            ("judge.method=rule", "judge.name=evidence", "credit.method=potential"),
            'judge.name = "evidence" scores a step by what happened after it',
        ),
        (
            (*RULE, "credit.method=potential", "rollout.harness=mini"),
            "rollout.harness names an agent program, whose turns are numbered as their replies end",
        ),
        (
            TEACHER,
            'judge.method = "teacher" gives log-probs, and credit.method = "outcome" does not read them',
        ),
        (("credit.method=distill",), "needs the log-probs of a teacher, and judge.method is"),
        (
            (*RULE, "credit.method=outcome_plus_distill"),
            'judge.method is "rule": set judge.method = "teacher"',
        ),
        ((*DISTILL, "credit.coefficient=0"), "credit.coefficient is 0, and"),
        ((*DISTILL, "judge.required=false"), "judge.required is false, and"),
        ((*DISTILL, "judge.tokenizer=''"), "judge.tokenizer is missing"),
        ((*DISTILL, "judge.endpoint.api_base=http://h/v1"), 'is of use with judge.method = "votes" only'),
        ((*DISTILL, "rollout.sampling.temperature=0.7"), "gives log-probs at temperature 1 only"),
        ((*DISTILL, "learner.loss.kind=sft"), 'learner.loss.kind = "sft" reads no advantages'),
        ((*DISTILL, "batch.advantage=group_mean"), "batch.advantage has no effect"),
        ((*DISTILL, "overlong.penalty=0.5"), "overlong.penalty has no effect"),
        ((*DISTILL, "curriculum.max_group_size=8"), 'credit.method = "distill" reads no rewards'),
        ((*DISTILL, "curriculum.kind=signal"), 'curriculum.kind = "signal" draws tasks by the chance'),
        (
            (*DISTILL, "credit.method=outcome_plus_distill", "rollout.group_size=1"),
            "rollout.group_size is 1, and a baseline needs two members",
        ),
        (("batch.min_valid_members=1",), "batch.min_valid_members is 1, and a baseline needs two members"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_by_its_field(
    minimal: Path, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_recipe(minimal, overrides)


def test_a_judge_is_measured_before_a_method_that_cannot_use_it_is_chosen(minimal: Path) -> None:
    measured = ("judge.method=rule", "judge.name=evidence", "credit.method=potential", "credit.coefficient=0")
    assert not load_recipe(minimal, measured).credit.reads_judgements


def test_the_judge_of_a_recipe_is_what_requests_carry(minimal: Path) -> None:
    recipe = load_recipe(minimal, (*RULE, "seed=7", "judge.score_submission=true"))
    form = read_judge(recipe)
    assert form is not None
    judge = form.judge
    assert (judge.method, judge.name, judge.seed, judge.score_submission) == ("rule", "commands", 7, True)
    assert judge_words(recipe.judge, recipe.credit) == (
        "rule commands; no group waits for its judgements, because [credit] reads no scores"
    )
    reads = CreditRecipe(method="outcome_then_steps")
    assert judge_words(recipe.judge, reads).startswith(
        "rule commands; a group that is ready waits up to 600 s"
    )


@pytest.mark.parametrize("method", ["distill", "outcome_plus_distill"])
def test_distillation_trains_every_group_whatever_its_rewards(minimal: Path, method: str) -> None:
    recipe = load_recipe(minimal, (*DISTILL, f"credit.method={method}"))
    assert recipe.trains_without_signal
    assert recipe.credit.reads_judgements
    assert judge_words(recipe.judge, recipe.credit) == (
        "teacher; a rollout without its log-probs is not trained, and a group waits for its judgements whatever happens, and none is "
        "enqueued while no judge works"
    )
    assert not load_recipe(minimal).trains_without_signal


def test_a_group_may_have_one_member_where_a_teacher_alone_decides(minimal: Path) -> None:
    recipe = load_recipe(minimal, (*DISTILL, "rollout.group_size=1"))
    assert recipe.min_valid_members == 1
    both = load_recipe(minimal, (*DISTILL, "credit.method=outcome_plus_distill"))
    assert both.min_valid_members == 2


def test_a_recipe_without_a_judge_asks_for_none(minimal: Path) -> None:
    assert read_judge(load_recipe(minimal)) is None


def test_paths_of_the_judge_are_relative_to_the_recipe(minimal: Path) -> None:
    recipe = load_recipe(minimal, VOTES)
    assert recipe.judge.tokenizer == str(minimal.parent / "judge")
    (minimal.parent / "resolved.toml").write_text(to_toml(recipe))
    assert load_recipe(minimal.parent / "resolved.toml") == recipe
    with pytest.raises(ValueError, match=r"^judge\.tokenizer: "):
        read_judge(recipe)


def test_templates_that_cannot_be_used_are_refused_by_their_key(minimal: Path) -> None:
    (minimal.parent / "judge.yaml").write_text("questions: what?\n")
    with pytest.raises(ValueError, match=r"^judge\.templates: .*questions: unknown key"):
        read_judge(load_recipe(minimal, (*RULE, "judge.templates=judge.yaml")))


def test_an_endpoint_takes_no_opening_of_its_votes(minimal: Path) -> None:
    (minimal.parent / "judge.yaml").write_text("opening: 'I say '\n")
    endpoint = ("judge.method=votes", "judge.endpoint.api_base=http://h/v1", "judge.endpoint.model=m")
    recipe = load_recipe(minimal, (*endpoint, "judge.templates=judge.yaml"))
    with pytest.raises(ValueError, match=r"^judge\.templates: .*judge\.yaml: opening: an endpoint cannot"):
        read_judge(recipe)
