"""Recipes: what is refused, and how it is said."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest

from pipeline.agent.config import load_agent
from trainer.learner.config import CORRECTIONS, UNCORRECTED, LossKind
from trainer.recipe import differences, load_any_recipe, load_recipe, set_keys, to_toml
from trainer.recipe.__main__ import reference
from trainer.recipe.schema import Recipe, Rollout
from trainer.recipe.wording import keys, meanings

RECIPES = Path("trainer/recipes")

MINIMAL = """
name = "r"
model = "policy"
num_steps = 3
[tasks]
train = "tasks.jsonl"
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.limits]
context_tokens = 8000
[batch]
groups_per_step = 2
[learner]
lr = 1e-6
"""


CONTROLLED = "admission={staleness='controlled', control={%s}}"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_loads(path: Path) -> None:
    assert load_any_recipe(path).name


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*a3b*.toml")), ids=lambda path: path.stem)
def test_a_recipe_for_a_mixture_of_experts_replays_the_routing_of_its_engines(path: Path) -> None:
    assert load_recipe(path).learner.routing_replay


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RECIPES.glob("*.toml")) if load_any_recipe(path).kind == "rl"],
    ids=lambda path: path.stem,
)
def test_every_recipe_that_is_shipped_names_an_agent_that_is_shipped(path: Path) -> None:
    assert load_agent(Path(load_recipe(path).rollout.agent_specs[0]).read_text())


def test_the_template_for_own_tasks_marks_exactly_what_is_not_shipped() -> None:
    text = (RECIPES / "own_tasks.toml").read_text()
    recipe = load_recipe(RECIPES / "own_tasks.toml")
    for path in (recipe.model, recipe.tasks.train, recipe.tasks.heldout):
        assert not Path(path).exists()
    paths = [line for line in text.splitlines() if " = " in line and '"../' in line.partition("#")[0]]
    to_fill_in = [line.split()[0] for line in paths if "# FILL IN: " in line]
    assert to_fill_in == ["model", "train", "heldout"]
    assert [line.split()[0] for line in paths if line.split()[0] not in to_fill_in] == ["agent"]


def test_the_reference_of_keys_is_up_to_date() -> None:
    made = "made by `python -m trainer.recipe --reference > docs/recipe.md`"
    assert Path("docs/recipe.md").read_text() == reference(), f"docs/recipe.md is {made}: do so"


def test_every_key_has_a_meaning_in_the_reference() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if not row.rstrip("| ").rpartition("|")[2].strip()] == []
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_reference_gives_a_keys_type_default_unit_and_comment() -> None:
    rows = reference().splitlines()
    assert any(row.startswith("| `group_size` | integer of 1 or more |  |  | Number of roll") for row in rows)
    assert any(
        row.startswith("| `queue_s` | number above 0 | *none* | s | Time that a group") for row in rows
    )
    assert any(row.startswith('| `dtype` | `"fp32"`, `"bf16"` | `"bf16"` |') for row in rows)
    assert "## `[rollout.limits.retries.grader]`" in rows
    assert (
        "| `tries` | integer of 1 or more | `3` |  | Number of failures"
        in reference().partition("retries.grader")[2]
    )


def test_a_meaning_is_the_comment_after_a_field_or_in_the_lines_above_it() -> None:
    meaning = meanings(Rollout)["group_deadline_s"]
    assert meaning.startswith("Time from a group's first claim")
    assert meaning.endswith("that sum is the default.")
    assert meanings(Recipe)["name"] == "First part of the run's id."


def test_each_meaning_says_what_its_key_is_and_leans_on_no_other() -> None:
    texts = dict(_meanings(Recipe))
    assert len(texts) > 200
    # What begins with none of these words begins with a noun, its adjective, or a verb.
    function_words = (
        "a above after all also an and as at because before below between but by each either every for from how if in into like "
        "most no of off on one or only over since so than that the there these they this those till to under unless until what when "
        "where whether which while who whose why with within without"
    )
    assert {
        key: text for key, text in texts.items() if text.split()[0].lower() in function_words.split()
    } == {}
    assert {key: text for key, text in texts.items() if not re.match(r"[A-Z][\w&'/-]*[ :;,]", text)} == {}
    assert {key: text for key, text in texts.items() if text[-1] != "." or "..." in text} == {}
    assert {key: text for key, text in texts.items() if len(text.split()) < 3} == {}


def _meanings(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What the reference says about each key and each table."""
    said = meanings(kind)
    for field in msgspec.structs.fields(kind):
        is_table = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        yield f"{prefix}{field.name}", said.get(field.name) or (is_table and inspect.getdoc(field.type)) or ""
        if is_table:
            yield from _meanings(field.type, f"{prefix}{field.name}.")


def test_a_refused_value_comes_with_the_meaning_of_its_key(minimal: Path) -> None:
    with pytest.raises(ValueError, match=r"a number above 0\. lr: Peak learning rate of Adam$"):
        load_recipe(minimal, ["learner.lr=0"])
    with pytest.raises(ValueError, match=r"it must be a table$"):
        load_recipe(minimal, ["learner=0"])


def test_an_unknown_key_is_refused_with_its_path(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "lrr = 1e-6\n")
    with pytest.raises(
        ValueError, match=r"learner\.lrr is not a key of a recipe; did you mean learner\.lr\?"
    ):
        load_recipe(minimal)


def test_an_unknown_key_among_the_limits_is_refused_though_messages_accept_them(minimal: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.limits\.turn is not a key .* mean rollout\.limits\.turns\?"
    ):
        load_recipe(minimal, ["rollout.limits.turn=3"])


def test_an_override_reads_as_toml_and_else_as_text(minimal: Path) -> None:
    recipe = load_recipe(
        minimal, ["learner.lr=2e-6", "name=other", "weights.engines=none", "learner.betas=[0.8, 0.9]"]
    )
    assert recipe.learner.lr == 2e-6
    assert recipe.name == "other"
    assert recipe.weights.engines == "none"
    assert recipe.learner.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("learner.lrr=1", "learner.lrr is not a key of a recipe; did you mean learner.lr?"),
        ("learner.turns=1", "did you mean rollout.limits.turns?"),
        ("audit.zzz=1", "audit.zzz is not a key of a recipe; audit has share"),
        ("learner=1", "learner is 1; it must be a table"),
        ("learner.lr.x=1", "`lr` is a value, not a table"),
        ("learner.lr", "write it as table.key=value"),
        ("num_steps=0", "num_steps is 0"),
        ("rollout.group_size=1", "rollout.group_size is 1, and a baseline needs two members"),
        (
            "curriculum.max_group_size=3",
            "curriculum.max_group_size is 3; set it to rollout.group_size = 4 at least, or remove it",
        ),
        (
            "curriculum={max_group_size=8, signal_share=1}",
            "curriculum.signal_share is 1; it must be a number above 0 and below 1",
        ),
        ("curriculum={max_group_size=8, signal_share=0}", "curriculum.signal_share is 0"),
        ("curriculum.signal_share=0.8", "is of use with curriculum.max_group_size only"),
        ("curriculum.plain_share=0.5", "curriculum.plain_share is of use with curriculum.kind"),
        ("curriculum.sharpness=2", 'curriculum.sharpness is of use with curriculum.kind = "signal" only'),
        ("curriculum.memory_episodes=9", "curriculum.memory_episodes is of use with"),
        ("rollout.sampling.top_p=0.9", "training needs top_p = 1 and no top_k"),
        ("rollout.sampling.top_k=50", "training needs top_p = 1 and no top_k"),
        ("rollout.sampling.temperature=0", "temperature must be above 0"),
        ("rollout.sampling.max_new_tokens=8000", "below rollout.limits.context_tokens = 8000"),
        ("rollout.limits.wall_s=0", "rollout.limits.wall_s is 0"),
        ("rollout.limits.context_tokens=9000", "set it to rollout.limits.context_tokens = 9000 or more"),
        ("rollout.context.head_share=1.5", "rollout.context.head_share"),
        ("rollout.context.refill_to=0", "rollout.context.refill_to"),
        ("rollout.context.policy=end", 'rollout.context.policy is "end"; it must be "stop" or "head_tail'),
        ("rollout.context={policy='stop', refill_to=0.5}", "refill_to is 0.5, which has no effect"),
        ("rollout.context={policy='stop', thinking='strip_on_cut'}", 'thinking is "strip_on_cut", which has'),
        (
            "batch.min_valid_members=5",
            "batch.min_valid_members is 5; set it to rollout.group_size = 4 at most",
        ),
        ("learner.snapshots_kept=3", "set it to 6"),
        ("learner.lr=0", "learner.lr is 0; it must be a number above 0"),
        ("evaluation.episodes=4", "tasks.heldout is missing"),
        (
            "tasks.unverified=ignore",
            'tasks.unverified is "ignore"; it must be one of "refuse", "heldout", "allow',
        ),
        (
            "weights.pause=freeze",
            'weights.pause is "freeze"; it must be one of "retract", "in_place", "abort',
        ),
        ("weights={transport='delta', engines='none'}", 'has no effect with weights.engines = "none"'),
        (
            "weights={transport='delta', receiver_port=70000}",
            "weights.receiver_port is 70000; it must be an integer from 1 to 65535",
        ),
        ("weights.receiver_port=30301", 'of use with weights.transport = "delta" only'),
        ("weights.adapters=alone", "set learner.lora.rank"),
        ("weights={adapters='alone', transport='distributed'}", 'set weights.transport to "disk" or "delta"'),
        ("weights.precision=fp4", 'weights.precision is "fp4"; it must be "learner" or "fp8'),
        (
            "weights.precision=fp8",
            "learner.snapshots_kept is 0, so the log-prob gap would be unmeasured; set it to",
        ),
        ("weights.adapters=apart", 'weights.adapters is "apart"; it must be "merged" or "alone'),
        ('rollouts.keep="some"', "rollouts.keep"),
        (
            "rollouts.keep=1.5",
            'rollouts.keep is 1.5; it must be "all" or "none" or a number above 0 and below 1',
        ),
        ("credit.coefficient=-0.1", "credit.coefficient is -0.1; it must be a number from 0 to 1"),
        ("credit.coefficient=0.2", 'has no effect with credit.method = "outcome"'),
        ("credit.method=outcome_then_steps", 'because judge.method is "none"'),
        ("overlong.penalty=-1", "overlong.penalty is -1; it must be a number of 0 or more"),
        ("overlong={penalty=1, buffer_tokens=9000}", "rollout.limits.context_tokens = 8000 at most"),
        ("overlong.buffer_tokens=7", "of use with overlong.penalty only"),
        (
            "overlong.filter=['length']",
            'overlong.filter is ["length"]; it must be a list of "turns", "context',
        ),
        (
            "learner.loss.kind=ppo",
            'learner.loss.kind is "ppo"; it must be one of "stream_grpo", "cispo", "grpo',
        ),
        ("learner.loss={kind='cispo', objective='my.py:f'}", "remove one of the two"),
        (
            "admission.staleness=adaptive",
            'admission.staleness is "adaptive"; it must be "fixed" or "controlled',
        ),
        (
            "admission.control.max_behaviour_kl=0.2",
            'has no effect with admission.staleness = "fixed": set that to "controlled", or remove it',
        ),
        (CONTROLLED % "most_versions=9", "set it to admission.max_lag_versions = 4 at most"),
        (
            CONTROLLED % "least_versions=5",
            "admission.control.least_versions is 5; set it to most_versions = 4 at most",
        ),
        (
            CONTROLLED % "min_ess_share=1.5",
            "admission.control.min_ess_share is 1.5; it must be a number above 0 and below 1",
        ),
        (
            CONTROLLED % "max_masked_share=0",
            "admission.control.max_masked_share is 0; it must be a number above 0",
        ),
        (
            CONTROLLED % "max_behaviour_kl=0",
            "admission.control.max_behaviour_kl is 0; it must be a number above 0",
        ),
        (
            CONTROLLED % "patience_steps=0",
            "admission.control.patience_steps is 0; it must be an integer of 1 or more",
        ),
        ("admission={max_lag_versions=40, staleness='controlled'}", "lags above 30 are counted as one"),
        ("rollouts.max_bytes=1000", "rollouts.max_bytes is 1000; it must be an integer of 1048576 or more"),
    ],
)
def test_a_mistake_is_refused_by_name_and_with_the_fix(minimal: Path, override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_recipe(minimal, [override])


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        ("['q_proj', 'k_proj']", "SGLang needs v_proj beside the others of learner.lora.targets; add it, or"),
        ("['k_proj', 'o_proj']", "SGLang needs q_proj and v_proj beside"),
        ("['up_proj']", "SGLang needs gate_proj beside"),
        ("['q_proj', 'v_proj', 'down_proj', 'gate_proj']", ""),
        ("['o_proj']", ""),
    ],
)
def test_adapters_alone_are_of_projections_of_which_sglang_makes_its_joined_layers(
    minimal: Path, targets: str, complaint: str
) -> None:
    overrides = ["learner.lora.rank=4", f"learner.lora.targets={targets}", "weights.adapters=alone"]
    if not complaint:
        assert load_recipe(minimal, overrides).weights.adapters == "alone"
        return
    with pytest.raises(ValueError, match=complaint):
        load_recipe(minimal, overrides)


def test_step_wise_credit_needs_a_baseline_that_divides_by_deviations(minimal: Path) -> None:
    judged = ["judge={method='rule', name='commands'}", "credit.method=step_wise"]
    with pytest.raises(ValueError, match=re.escape('set batch.advantage = "group_mean_std"')):
        load_recipe(minimal, judged)
    assert load_recipe(minimal, [*judged, "batch.advantage=group_mean_std"]).credit.coefficient == 0.1


@pytest.mark.parametrize(
    "override",
    [
        "learner.weight_decay=-1",
        "learner.betas=[2,3]",
        "learner.betas=[0.9,1.0]",
        "learner.eps=-1",
        "learner.clip_grad=-1",
        "learner.lr=nan",
        "learner.seed=-1",
        "learner.train_only=['']",
        "learner.loss.clip_high=-0.1",
        "learner.loss.clip_low=1.5",
        "learner.loss.veto_low=2.0",
        "learner.loss.ratio_cap=0.5",
        "learner.loss.delta=0",
        "learner.loss.constant_tokens=0",
        "learner.loss.entropy=-1",
        "learner.loss.geometric_mask=[0.0,inf]",
        "learner.lora.rank=-8",
        "learner.lora.alpha=inf",
        "rollout.limits.observation_chars=-1",
        "rollout.limits.turns=0",
        "rollout.limits.wall_s=nan",
        "rollout.limits.retries.grader.tries=0",
        "rollout.limits.retries.grader.first_s=-1",
        "rollout.queue_s=-4",
        "rollout.group_deadline_s=inf",
        "rollout.agent=''",
        "rollout.context.head_share=-0.1",
        "tasks.train=''",
        "tasks.heldout_sets={more=''}",
        "name='a b/c'",
        "name=''",
        "name='..'",
        'name="a\\n"',
        "model=''",
        "seed=-1",
        "num_steps=18446744073709551616",
        "batch.min_valid_members=0",
        "batch.max_failed_groups=-1",
        "admission.sweep_every_s=inf",
        "admission.control.least_versions=-1",
        "weights.engines_at_once=-1",
        "evaluation.every_steps=-5",
        "evaluation.samples_per_task=0",
        "checkpoint.keep=0",
        "audit.share=1.5",
        "grading.controls=0.0",
        "judge.wait_s=-1",
        "judge.endpoint.key_env='MY KEY'",
        "alarms.window_steps=1",
        "alarms.redis_share=1.0",
        "alarms.webhook_env='http://host/hook'",
        "plan.utilisation=1.5",
        "plan.network_gib_per_s=0",
        "plan.episode_turns=0",
        'sinks.wandb.project="a\\u001b]0;b"',
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_key_and_blamed_on_whoever_gave_it(
    minimal: Path, override: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ValueError, match=f"^{re.escape(f'--set {override}: {key}')}.* must be ") as raised:
        load_recipe(minimal, [override])
    assert "`" not in str(raised.value).removeprefix(f"--set {override}"), "not msgspec's own words"


def test_every_number_and_text_of_a_recipe_has_its_limits() -> None:
    # Of a judge's endpoint: what the server makes of them is its own.
    free = {"judge.endpoint.options"}
    unlimited = [key for key, kind in keys(Recipe) if key not in free and {int, float, str} & {*_bare(kind)}]
    assert unlimited == []


def _bare(kind: Any) -> Iterator[Any]:
    """The types within `kind` that nothing limits."""
    if get_origin(kind) is Annotated:
        return
    within = [one for one in get_args(kind) if get_origin(kind) is not Literal]
    # The keys of a table of values are checked by the recipe's own check.
    within = within[1:] if get_origin(kind) is dict else within
    yield from (bare for one in within for bare in _bare(one))
    if not within:
        yield kind


def test_a_mistake_of_the_file_is_blamed_on_the_file_whatever_is_set(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "epz = 1e-6\n")
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(minimal))}: learner\.epz is not a key .* learner\.eps"
    ):
        load_recipe(minimal, ["learner.lr=2e-6", "name=n"])
    minimal.write_text(MINIMAL + "snapshots_kept = 4\n")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(minimal))}: learner\.snapshots_kept is 4"):
        load_recipe(minimal, ["name=n"])
    with pytest.raises(
        ValueError, match=r"^--set admission\.max_lag_versions=3: learner\.snapshots_kept is 4"
    ):
        load_recipe(minimal, ["name=n", "admission.max_lag_versions=3"])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("lerner.lr=1", "lerner is not a key of a recipe"),
        ("learner.losss.kind=grpo", "learner.losss is not a key of a recipe"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling: training needs top_p = 1"),
        ("judge.wait_s=9", 'judge.method is "none"'),
        ("tasks.heldout_sets.more=1", "tasks.heldout_sets is "),
        ("overlong.penalty=0.5", "overlong.buffer_tokens is 4096"),
        ("sinks.wandb.entity=me", "sinks.wandb.project is missing"),
        ("rollout.limits.retries.policy.first_s=2", "rollout.limits.retries.policy.tries is missing"),
        ("admission={max_lag_versions=3}", "learner.snapshots_kept is 4"),
    ],
)
def test_an_override_is_blamed_also_for_a_fault_that_names_only_its_table(
    minimal: Path, override: str, complaint: str
) -> None:
    text = MINIMAL.replace("8000", "2000") + "micro_batch_tokens = 2000\nsnapshots_kept = 4\n"
    minimal.write_text(f"{text}[admission]\nmax_lag_versions = 2\n[rollout.sampling]\nmax_new_tokens = 500\n")
    with pytest.raises(ValueError, match=f"^{re.escape(f'--set {override}: {complaint}')}"):
        load_recipe(minimal, ["learner.eps=1e-7", override, "learner.lr_min=0"])


@pytest.mark.parametrize(
    "override",
    [
        "name=a\nseed=2",
        "name='''a\nb'''",
        f"name='{'y' * 9_000} '",
        "na\nme=1",
        '"learner.lr"=1',
        "seed=1\nname=''",
    ],
)
def test_an_override_is_one_value_of_one_key_and_is_said_in_one_short_line(
    minimal: Path, override: str
) -> None:
    with pytest.raises(ValueError, match=r"^--set [^\n]{,900}$"):
        load_recipe(minimal, [override])


def test_a_missing_key_is_named_with_what_it_must_be(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace("groups_per_step = 2", ""))
    with pytest.raises(
        ValueError, match=r"batch\.groups_per_step is missing; it must be an integer of 1 or more"
    ):
        load_recipe(minimal)


def test_a_missing_file_and_broken_toml_are_named(minimal: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_recipe(minimal.with_name("absent.toml"))
    minimal.write_text("name = ")
    with pytest.raises(ValueError, match="not TOML"):
        load_recipe(minimal)


def test_paths_are_meant_from_the_recipes_own_directory(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert recipe.model == str(minimal.parent / "policy")
    assert recipe.tasks.train == str(minimal.parent / "tasks.jsonl")
    assert recipe.tasks.heldout == "", "what is absent stays so"
    own = load_recipe(minimal, ["learner.loss.objective=my.py:name"])
    assert own.learner.loss.objective == f"{minimal.parent}/my.py:name"


def test_the_resolved_copy_loads_to_an_equal_recipe(minimal: Path, tmp_path: Path) -> None:
    loss = "learner.loss={objective='my.py:f', geometric_mask=[0.5, 2.0], clip_low=0.1}"
    recipe = load_recipe(
        minimal, [loss, 'sinks.wandb.project="quo\\"te \\\\ ü"', "learner.train_only=['.mlp.', '.attn.']"]
    )
    copy = tmp_path / "resolved.toml"
    copy.write_text(to_toml(recipe))
    assert load_recipe(copy) == recipe
    assert "top_p = 1.0" in copy.read_text(), "defaults are spelled out"


def test_half_the_group_must_be_valid_unless_said_otherwise(minimal: Path) -> None:
    assert load_recipe(minimal).min_valid_members == 2
    assert load_recipe(minimal, ["rollout.group_size=7"]).min_valid_members == 4
    assert load_recipe(minimal, ["batch.min_valid_members=3"]).min_valid_members == 3


def test_a_full_context_is_cut_unless_the_recipe_says_stop(minimal: Path) -> None:
    assert load_recipe(minimal).rollout.context.policy == "head_tail"
    stopping = load_recipe(minimal, ["rollout.context={policy='stop', thinking='strip'}"])
    assert (stopping.rollout.context.policy, stopping.rollout.context.thinking) == ("stop", "strip")


def test_differences_are_listed_by_key(minimal: Path) -> None:
    assert differences(load_recipe(minimal), load_recipe(minimal, ["learner.lr=2e-6"])) == [
        "learner.lr: 1e-06 -> 2e-06"
    ]


def test_keys_that_do_not_have_their_default_are_listed(minimal: Path) -> None:
    given = ["learner.lr=1e-6", "learner.weight_decay=0.1", "weights.keep=3", "batch.groups_per_step=4"]
    found = dict(one.split(": ", 1) for one in set_keys(load_recipe(minimal, given)))
    assert found["learner.weight_decay"] == "0.1"
    assert found["batch.groups_per_step"] == "4"
    assert found["name"] == "r", "it has no default"
    assert "weights.keep" not in found, "3 is the default"
    assert "rollout.sampling.top_p" not in found


def test_engines_in_low_precision_need_an_audit_and_an_objective_that_corrects_the_gap(minimal: Path) -> None:
    packed = ["weights.precision=fp8", "learner.snapshots_kept=6"]
    assert load_recipe(minimal, packed).weights.precision == "fp8"
    for override, fault in {
        "learner.loss.kind=reinforce": r"learner\.loss\.kind = \"reinforce\" does not read the log-probs of the engines.*set another",
        "learner.loss.kind=sft": r"learner\.loss\.kind = \"sft\" does not read the log-probs of the engines",
        "audit.share=0": r"audit\.share is 0, so the log-prob gap would be unmeasured; set it above 0",
        "weights={precision='fp8', adapters='alone'}": r'set weights\.adapters = "merged", or weights\.precision = "learner"',
    }.items():
        with pytest.raises(ValueError, match=fault):
            load_recipe(minimal, [*packed, "learner.lora.rank=4", override])
    own = [*packed, "learner.loss.objective=mine.py:own"]
    assert load_recipe(minimal, own).learner.loss.objective.endswith("mine.py:own")


def test_what_each_objective_does_about_the_gap_is_said_or_it_is_refused() -> None:
    assert {*CORRECTIONS, *UNCORRECTED} == {*get_args(LossKind)}
    assert not {*CORRECTIONS} & {*UNCORRECTED}
