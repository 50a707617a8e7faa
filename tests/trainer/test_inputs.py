"""Tasks that nobody has seen judged rightly are refused, unless the recipe says otherwise."""

import json
import re
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.scripted_fleet import task
from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ReplyFormat
from pipeline.task import Calibration, Contradiction, RewardFile, Task, TextChange, pack
from pipeline.taskfile import (
    FILE,
    Strength,
    TaskFacts,
    Verification,
    fingerprint,
    read_facts,
    verified_path,
    write_facts,
    write_tasks,
    write_verified,
)
from pipeline.tokenizer import read_bundle
from trainer.inputs import check_deadlines, check_learner, describe, read_inputs, read_tokenizer
from trainer.recipe import Recipe, load_recipe

RECIPE = """
name = "r"
model = "{model}"
num_steps = 3
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.limits]
context_tokens = 512
[rollout.sampling]
max_new_tokens = 16
[batch]
groups_per_step = 2
[learner]
lr = 1e-6
micro_batch_tokens = 512
"""
TRAIN = [task("t0"), task("t1")]
HELDOUT = [task("h0")]
CALIBRATION = pack(
    Calibration(
        passing=("t.py::test_a",),
        contradictions=(
            Contradiction(
                path="t.py",
                changes=(TextChange(offset_bytes=9, was="4", becomes="5"),),
                fails=("t.py::test_a",),
            ),
        ),
    )
)


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model))
    write_tasks(tmp_path / "train.jsonl", TRAIN)
    write_tasks(tmp_path / "heldout.jsonl", HELDOUT)
    return tmp_path


def recipe(place: Path, unverified: str = "refuse", *overrides: str) -> Recipe:
    return load_recipe(place / "recipe.toml", [f"tasks.unverified={unverified}", *overrides])


def verified(one: Task, *, reason: str = "") -> Verification:
    return Verification(
        task=one.id,
        fingerprint=fingerprint(one),
        states={
            "empty": 0,
            "useless": 0,
            "tests_only": 0,
            "gold": 0 if reason else 1,
            "agent": 0 if reason else 1,
        },
        ok=not reason,
        reason=reason,
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=1.0,
    )


def write(place: Path, name: str, *verifications: Verification) -> None:
    write_verified(verified_path(place / name), verifications)


def test_verified_tasks_are_taken_and_the_plan_says_so(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    write(place, "heldout.jsonl", *map(verified, HELDOUT))
    inputs = read_inputs(recipe(place))
    assert (inputs.num_unverified, inputs.train, inputs.heldout) == (0, TRAIN, HELDOUT)
    assert "1 held out; all verified" in describe(recipe(place), inputs)


def test_a_run_without_held_out_tasks_asks_for_no_verification_of_them(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    (place / "recipe.toml").write_text(
        (place / "recipe.toml").read_text().replace('heldout = "heldout.jsonl"', "")
    )
    assert read_inputs(recipe(place)).heldout == []


@pytest.mark.parametrize(
    ("known", "doubt"),
    [
        ([], "2 of the 2 tasks in {path} are not verified; the first, t0, was never verified"),
        ([verified(TRAIN[0])], "1 of the 2 tasks in {path} are not verified; the first, t1, was never"),
        (
            [verified(TRAIN[0]), verified(replace(TRAIN[1], problem="Else."))],
            "the first, t1, has changed since it was verified",
        ),
        (
            [verified(TRAIN[0], reason="gold: flaky"), verified(TRAIN[1])],
            "the first, t0, was found wrong (gold: flaky)",
        ),
    ],
)
def test_other_training_tasks_are_refused_with_what_to_do(
    place: Path, known: list[Verification], doubt: str
) -> None:
    write(place, "train.jsonl", *known)
    path = place / "train.jsonl"
    for unverified in ("refuse", "heldout"):
        with pytest.raises(ValueError, match=re.escape(doubt.format(path=path))) as refusal:
            read_inputs(recipe(place, unverified))
        assert str(refusal.value).startswith("tasks.train: ")
        assert f"`python -m workers.verify {path}`" in str(refusal.value)


def test_held_out_tasks_may_be_let_through_alone(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    with pytest.raises(ValueError, match=r"tasks\.heldout: 1 of the 1 .* to 'heldout' or 'allow'"):
        read_inputs(recipe(place))
    assert read_inputs(recipe(place, "heldout")).num_unverified == 1


def test_everything_may_be_let_through_and_the_plan_says_so(place: Path) -> None:
    inputs = read_inputs(recipe(place, "allow"))
    assert inputs.num_unverified == 3
    assert '3 not verified, as tasks.unverified = "allow" allows' in describe(recipe(place, "allow"), inputs)


def test_each_task_carries_what_its_verification_found(place: Path) -> None:
    leaking = ("/tmp/repo.bundle",)
    calibrated = [
        replace(verified(one), calibration=CALIBRATION, leaking_paths=leaking) for one in (TRAIN[0], *HELDOUT)
    ]
    write(place, "train.jsonl", calibrated[0], verified(TRAIN[1]))
    write(place, "heldout.jsonl", calibrated[1])
    inputs = read_inputs(recipe(place))
    assert [one.calibration for one in inputs.train] == [CALIBRATION, b""]
    assert [one.calibration for one in inputs.heldout] == [CALIBRATION]
    assert [one.leaking_paths for one in (*inputs.train, *inputs.heldout)] == [leaking, (), leaking]
    assert [fingerprint(one) for one in inputs.train] == [fingerprint(one) for one in TRAIN]


@pytest.mark.parametrize(
    ("controls", "line"),
    [
        (
            "always",
            "2 of 3 tasks have controls; each of their gradings has a control run",
        ),
        ("0.25", "2 of 3 tasks have controls; 25% of their gradings have a control run"),
        ("never", 'controls: none is run, as grading.controls = "never" says'),
    ],
)
def test_the_plan_says_how_many_tasks_have_controls(place: Path, controls: str, line: str) -> None:
    without = replace(verified(HELDOUT[0]), calibration=pack(Calibration(passing=("t.py::test_a",))))
    write(place, "train.jsonl", *(replace(verified(one), calibration=CALIBRATION) for one in TRAIN))
    write(place, "heldout.jsonl", without)
    given = recipe(place, "refuse", f"grading.controls={controls}")
    assert line in describe(given, read_inputs(given))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.context.refill_to=0.5",
            "holds 496 tokens at most; a longer one is cut to its first and newest turns until 50%",
        ),
        ("rollout.context.policy=stop", "context: an episode ends when its 512 tokens are used up"),
        ("rollout.context.thinking=strip", "the learner's work grows with the square of the turns"),
        ("rollout.context.every_step=true", "each turn is a sample of its own, so the learner's work grows"),
    ],
)
def test_the_plan_says_what_becomes_of_a_full_context(place: Path, override: str, line: str) -> None:
    given = recipe(place, "allow", override)
    assert line in describe(given, read_inputs(given))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.seed=1", "objective: stream_grpo, with its own numbers"),
        (
            "learner.loss={kind='gspo', clip_high=1e-3, geometric_mask=[0.9, 1.1]}",
            "objective: gspo, with clip_high = 0.001, geometric_mask = [0.9, 1.1]",
        ),
    ],
)
def test_the_plan_names_the_objective_and_what_the_recipe_changes_of_it(
    place: Path, override: str, line: str
) -> None:
    given = recipe(place, "allow", override)
    assert line in describe(given, read_inputs(given)).splitlines()


def test_an_objective_that_is_not_there_is_found_before_anything_is_started(place: Path) -> None:
    given = recipe(place, "allow", "learner.loss.objective=mine.py:own")
    with pytest.raises(ValueError, match=r"learner\.loss\.objective: .*mine\.py: No such file or directory"):
        check_learner(given)


def test_packed_weights_are_refused_with_the_commands_that_write_them_anew(place: Path) -> None:
    given = recipe(place, "allow")
    directory = shutil.copytree(given.model, place / "packed")
    keys = json.loads((directory / "config.json").read_text())
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(keys | {"quantization_config": packed}))
    given = replace(given, model=str(directory))
    with pytest.raises(
        ValueError, match=r"^model: .* has packed weights .*trainer\.convert .* CHECKPOINT` and `.*--model"
    ):
        check_learner(given)


def in_fp8(model: str, target: Path) -> Path:
    """The directory of a model whose `config.json` says that its weights are in FP8."""
    directory = shutil.copytree(model, target)
    keys = json.loads((directory / "config.json").read_text())
    keys |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    keys |= {"hidden_size": 256, "intermediate_size": 256}
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(keys | {"quantization_config": packed}))
    return directory


PACKED = ("weights.precision=fp8", "learner.snapshots_kept=9")


def test_a_recipe_of_versions_in_eight_bits_needs_a_model_in_eight_bits(place: Path) -> None:
    given = recipe(place, "allow", *PACKED)
    packed = in_fp8(given.model, place / "packed")
    check_learner(replace(given, model=str(packed)))
    with pytest.raises(ValueError, match=r'has packed weights .* or set weights\.precision = "fp8"$'):
        check_learner(replace(recipe(place, "allow"), model=str(packed)))
    keys = json.loads((packed / "config.json").read_text())
    quantization = keys.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(keys))
    with pytest.raises(
        ValueError,
        match=r'^weights\.precision = "fp8": .* has no weights in FP8 .*`python -m trainer\.convert --fp8',
    ):
        check_learner(replace(given, model=str(packed)))
    keys["quantization_config"] = quantization | {"scale_fmt": "ue8m0"}
    (packed / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ValueError, match=r"quantization_config\.scale_fmt = 'ue8m0'"):
        check_learner(replace(given, model=str(packed)))
    del keys["quantization_config"]["scale_fmt"]
    (packed / "config.json").write_text(json.dumps(keys | {"hidden_size": 192}))
    with pytest.raises(ValueError, match=r'^weights\.precision = "fp8": self_attn\.q_proj has 192 inputs'):
        check_learner(replace(given, model=str(packed)))


@pytest.mark.parametrize(
    ("override", "correction"),
    [
        ("learner.loss.kind=tis", "corrected by a weight of min(p / mu, cap) for each token"),
        (
            "learner.loss={kind='tis', ratio_cap=3.0}",
            "corrected by a weight of min(p / mu, 3) for each token",
        ),
        (
            "learner.loss={kind='gspo', geometric_mask=[0.9, 1.1]}",
            "so not token by token; a trajectory whose mean ratio is outside [0.9, 1.1] is not trained",
        ),
        ("learner.loss.objective=mine.py:own", "mine.py:own makes of the engines' log-probs"),
    ],
)
def test_the_plan_says_what_corrects_the_gap_to_engines_in_low_precision(
    place: Path, override: str, correction: str
) -> None:
    given = recipe(place, "allow", *PACKED, override)
    (line,) = [one for one in describe(given, read_inputs(given)).splitlines() if one.startswith("precision")]
    assert line.startswith("precision: engines compute with weights in FP8, the learner in bf16; ")
    assert "measured on 2.0% of the tokens" in line
    assert line.endswith(correction)
    given = recipe(place, "allow", override)
    assert "precision:" not in describe(given, read_inputs(given))


def test_what_puts_users_next_to_each_other_is_refused_where_they_take_turns_with_assistants(
    place: Path,
) -> None:
    strict = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    (place / "strict.jinja").write_text(strict)
    chosen = f"chat.template={place / 'strict.jinja'}"
    assert read_inputs(recipe(place, "allow", chosen))
    with pytest.raises(ValueError, match=r'rollout\.context\.marker is "message".*set it to "append"'):
        read_inputs(recipe(place, "allow", chosen, "rollout.context.marker=message"))
    files = f"['{place / 'agent.yaml'}', 'swerve.upstream=\"2.4\"', 'swerve.dialect=text']"
    exact = ("rollout.exact=true", f"rollout.agent={files}")
    assert read_inputs(recipe(place, "allow", *exact))
    with pytest.raises(ValueError, match=r"rollout\.exact.*set rollout\.exact to false"):
        read_inputs(recipe(place, "allow", chosen, *exact))


def test_a_calibration_of_the_task_as_it_was_before_is_not_used(place: Path) -> None:
    before = replace(verified(replace(TRAIN[0], problem="Else.")), calibration=CALIBRATION)
    write(place, "train.jsonl", before, verified(TRAIN[1]))
    assert read_inputs(recipe(place, "allow")).train[0].calibration == b""


def test_a_calibration_that_a_task_file_brings_along_is_not_used(place: Path) -> None:
    write_tasks(place / "train.jsonl", [replace(one, calibration=CALIBRATION) for one in TRAIN])
    write(place, "train.jsonl", *map(verified, TRAIN))
    assert [one.calibration for one in read_inputs(recipe(place, "heldout")).train] == [b"", b""]


def test_a_damaged_calibration_is_refused_with_what_to_do(place: Path) -> None:
    write(place, "train.jsonl", replace(verified(TRAIN[0]), calibration=b"rubbish"), verified(TRAIN[1]))
    with pytest.raises(
        ValueError, match=r"tasks\.train: the calibration of t0 in .* `python -m workers\.verify .*` again"
    ):
        read_inputs(recipe(place, "heldout"))


def write_strengths(place: Path, *passing: int | None) -> None:
    """Of the training tasks: how many of ten partial fixes passed; None: their strength was not measured."""
    strengths = [
        None
        if num is None
        else Strength(num_partial_fixes=10, passing=("a.py:1: the line is taken back",) * num)
        for num in passing
    ]
    known = [
        replace(verified(one), strength=strength) for one, strength in zip(TRAIN, strengths, strict=True)
    ]
    write(place, "train.jsonl", *known)
    write(place, "heldout.jsonl", *map(verified, HELDOUT))


# Of ten partial fixes five pass: at 95 %, the weakness is 0.24 to 0.76.
@pytest.mark.parametrize(("max_weakness", "kept"), [("0", ["t0"]), ("0.23", ["t0"]), ("0.24", ["t0", "t1"])])
def test_tasks_that_are_shown_to_be_weak_are_left_out_of_training(
    place: Path, max_weakness: str, kept: list[str]
) -> None:
    write_strengths(place, 0, 5)
    given = recipe(place, "refuse", f"tasks.max_weakness={max_weakness}")
    inputs = read_inputs(given)
    assert [one.id for one in inputs.train] == kept
    assert (
        f"{2 - len(kept)} left out, which are weaker than tasks.max_weakness = {max_weakness} at 95 %\n"
        in describe(given, inputs)
    )


def test_tasks_of_which_no_partial_fix_could_be_made_are_kept_and_counted(place: Path) -> None:
    known = [
        replace(verified(one), strength=Strength(num_partial_fixes=num, passing=()))
        for one, num in zip(TRAIN, (0, 1), strict=True)
    ]
    write(place, "train.jsonl", *known)
    write(place, "heldout.jsonl", *map(verified, HELDOUT))
    given = recipe(place, "refuse", "tasks.max_weakness=0")
    inputs = read_inputs(given)
    assert [one.id for one in inputs.train] == ["t0", "t1"]
    assert "at 95 %; 1 of unknown weakness, without any partial fix\n" in describe(given, inputs)


def test_a_bound_on_weakness_needs_every_training_task_measured(place: Path) -> None:
    write_strengths(place, 0, None)
    read_inputs(recipe(place))
    with pytest.raises(
        ValueError, match=r"not measured for 1 of the 2 tasks in .*; the first is t1"
    ) as refusal:
        read_inputs(recipe(place, "refuse", "tasks.max_weakness=0.5"))
    assert f"`python -m workers.verify {place / 'train.jsonl'} --strength`" in str(refusal.value)


def test_a_bound_that_leaves_no_task_is_refused(place: Path) -> None:
    write_strengths(place, 5, 8)
    with pytest.raises(ValueError, match=r"tasks\.max_weakness is 0\.1; every task in .* is weaker"):
        read_inputs(recipe(place, "refuse", "tasks.max_weakness=0.1"))


def test_a_bound_that_is_no_share_is_refused(place: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks\.max_weakness is 20; .* from 0 to 1"):
        recipe(place, "refuse", "tasks.max_weakness=20")


def chatting(place: Path, table: str) -> Recipe:
    with (place / "recipe.toml").open("a") as file:
        file.write(f"[chat]\n{table}\n")
    return recipe(place, "allow")


def test_the_plan_says_how_replies_are_read_and_what_the_template_would_render_otherwise(place: Path) -> None:
    (place / "other.jinja").write_text(Path("tests/chat_templates/Qwen-Qwen3-0.6B.jinja").read_text())
    chosen = chatting(place, 'template = "other.jinja"\ntemplate_kwargs = {enable_thinking = false}')
    inputs = read_inputs(chosen)
    assert inputs.tokenizer.template_kwargs == {"enable_thinking": False}
    (line,) = [line for line in describe(chosen, inputs).splitlines() if line.startswith("chat: ")]
    assert "thoughts are read as think, tool calls as hermes, enable_thinking = False" in line
    assert "the template drops the thoughts of earlier replies; here they stay" in line


def test_the_forms_of_replies_may_be_named(place: Path) -> None:
    chosen = chatting(place, 'tool_calls = "glm"\nthoughts = "mistral"')
    assert read_inputs(chosen).tokenizer.reply_format == ReplyFormat(thoughts="mistral", tool_calls="glm")


def test_a_template_that_cannot_be_used_is_refused_with_its_file(place: Path) -> None:
    (place / "other.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(ValueError, match=r"chat\.template: .*other\.jinja: .*set chat\.template to another"):
        read_inputs(chatting(place, 'template = "other.jinja"'))


def test_an_agent_that_calls_tools_needs_a_template_that_describes_them(place: Path) -> None:
    (place / "agent.yaml").write_text(
        "agent: {system_template: s, instance_template: '{{task}}'}\nswerve: {dialect: tool_calls, upstream: '2.4'}\n"
    )
    (place / "other.jinja").write_text(Path("tests/chat_templates/trl-phi3.jinja").read_text())
    with pytest.raises(ValueError, match="does not describe the agent's tools"):
        read_inputs(chatting(place, 'template = "other.jinja"'))
    other = place / "other.jinja"
    other.write_text(
        Path("tests/chat_templates/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja").read_text()
    )
    chosen = recipe(place, "allow")
    assert read_tokenizer(Path(chosen.model), chosen.chat, (BASH_TOOL,)).reply_format.tool_calls == "hermes"
    with pytest.raises(ValueError, match="correct the chat template"):
        read_tokenizer(Path(chosen.model), chosen.chat, ())


def test_what_verification_found_of_each_task_is_known_without_anything_hidden(place: Path) -> None:
    strength = Strength(num_partial_fixes=4, passing=("a.py:1: the line is taken back",))
    flaky = pack(Calibration(passing=("t.py::test_a",), flaky=("t.py::test_b",)))
    known = replace(verified(TRAIN[0]), strength=strength, calibration=flaky, num_tests=1)
    write(place, "train.jsonl", known, replace(verified(TRAIN[1]), fingerprint="older"))
    write(place, "heldout.jsonl", verified(HELDOUT[0], reason="the base passes t.py::test_hidden"))
    facts = {one.task_id: one for one in read_inputs(recipe(place, "allow")).task_facts}
    assert facts["t0"] == TaskFacts(
        task_id="t0",
        verified="ok",
        num_tests=1,
        num_flaky=1,
        num_partial_fixes=4,
        weakness=0.25,
        weakness_interval=strength.interval,
    )
    assert (facts["t1"].verified, facts["h0"].verified) == ("changed", "wrong")
    write_facts(place, facts.values())
    text = (place / FILE).read_text()
    assert "a.py" not in text
    assert "test_hidden" not in text
    assert read_facts(place) == facts


def test_a_teacher_reads_the_policys_token_ids_so_another_vocabulary_is_refused(
    place: Path, tiny_model: Path
) -> None:
    teacher = place / "teacher"
    shutil.copytree(tiny_model, teacher)
    distill = (
        "judge.method=teacher",
        f"judge.tokenizer={teacher}",
        "judge.required=true",
        "credit.method=distill",
        "credit.coefficient=1",
    )
    inputs = read_inputs(recipe(place, "allow", *distill))
    assert inputs.judge is not None
    assert (inputs.judge.judge.method, inputs.judge.tokenizer) == ("teacher", read_bundle(teacher))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    names = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    vocab = tokenizer["model"]["vocab"]
    vocab[names[10]], vocab[names[11]] = vocab[names[11]], vocab[names[10]]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError, match=r"judge\.tokenizer: .* has another vocabulary than model = .*: id \d+ is"
    ):
        read_inputs(recipe(place, "allow", *distill))


SOURCES = """
[[sources]]
name = "lang"
tasks = "train.jsonl"
share = 3
[[sources]]
name = "tools"
tasks = "tools.jsonl"
share = 1
harness = "pi"
group_size = 6
limits = { turns = 9, context_tokens = 8192 }
context.policy = "stop"
[chat]
template = "tools.jinja"
"""


@pytest.fixture
def several(place: Path) -> Path:
    """A place whose recipe has two sources of verified tasks; an agent program plays those of the second."""
    text = (place / "recipe.toml").read_text().replace('train = "train.jsonl"', "")
    text = text.replace("micro_batch_tokens = 512", "micro_batch_tokens = 8192")
    (place / "recipe.toml").write_text(text + SOURCES)
    shutil.copy("tests/chat_templates/Qwen-Qwen3-0.6B.jinja", place / "tools.jinja")
    write_tasks(place / "tools.jsonl", [task("u0")])
    write(place, "train.jsonl", *map(verified, TRAIN))
    write(place, "tools.jsonl", verified(task("u0")))
    write(place, "heldout.jsonl", *map(verified, HELDOUT))
    return place


def test_each_source_has_its_own_tasks_and_who_plays_them(several: Path) -> None:
    given = recipe(several)
    inputs = read_inputs(given)
    lang, tools = inputs.sources
    assert [(one.name, [each.id for each in one.tasks]) for one in inputs.sources] == [
        ("lang", ["t0", "t1"]),
        ("tools", ["u0"]),
    ]
    assert (lang.harness, lang.agent_config) == (None, inputs.agent_config)
    assert tools.harness is not None
    assert inputs.harness is None, "held-out tasks are played as [rollout] says"
    assert {one.task_id for one in inputs.task_facts} == {"t0", "t1", "u0", "h0"}


def test_the_plan_says_of_each_source_what_its_rollouts_are(several: Path) -> None:
    given = recipe(several)
    lines = describe(given, read_inputs(given)).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("source lang: "))
    second = next(place for place, line in enumerate(lines) if line.startswith("source tools: "))
    assert lines[first].startswith("source lang: 75.0% of the groups, 2 tasks (2.2 epochs), 50 turns at most")
    assert lines[second].startswith(
        "source tools: 25.0% of the groups, 1 tasks (1.5 epochs), 9 turns at most"
    )
    assert any(line.startswith("agent: ") for line in lines[first:second])
    assert any(line.startswith("program: pi ") for line in lines[second:])
    assert any(line.startswith("group: 2 of 4 members") for line in lines[first:second])
    assert any(line.startswith("group: 3 of 6 members") for line in lines[second:])
    assert "3 steps x 2 groups x 6 rollouts" in lines[0]


def test_a_task_that_two_sources_have_is_refused_with_both_files(several: Path) -> None:
    write_tasks(several / "tools.jsonl", [task("u0"), TRAIN[1]])
    with pytest.raises(ValueError, match=r"^sources\.lang\.tasks and sources\.tools\.tasks: ") as refusal:
        read_inputs(recipe(several, "allow"))
    for text in ("both have t1", str(several / "train.jsonl"), str(several / "tools.jsonl")):
        assert text in str(refusal.value)


def test_a_fault_of_a_source_names_it(several: Path) -> None:
    (several / "tools.verified.jsonl").unlink()
    with pytest.raises(ValueError, match=r"^sources\.tools\.tasks: 1 of the 1 tasks in .* are not verified"):
        read_inputs(recipe(several))
    with pytest.raises(ValueError, match=r"^sources\.lang, with \[rollout\] .*: rollout\.agent: "):
        read_inputs(recipe(several, "allow", "sources.lang.agent=absent.yaml"))
    with pytest.raises(
        ValueError, match=r"tasks\.heldout shares 1 tasks with sources\.tools\.tasks, such as u0"
    ):
        read_inputs(recipe(several, "allow", "tasks.heldout=tools.jsonl"))
    late = recipe(several, "allow", "rollout.group_deadline_s=2000", "sources.lang.limits.wall_s=3000")
    with pytest.raises(ValueError, match=r"^sources\.lang, .* and an episode may play for 3000 s"):
        check_deadlines(late, read_inputs(late))


def test_tasks_whose_rewards_are_fractions_have_no_rate_of_success_to_choose_by(place: Path) -> None:
    verdict = RewardFile(eval_script="true\n", fractions=True)
    write_tasks(place / "train.jsonl", [TRAIN[0], replace(TRAIN[1], verdict=verdict)])
    assert len(read_inputs(recipe(place, "allow")).train) == 2
    for choice in ("curriculum.kind=signal", "curriculum.max_group_size=8"):
        with pytest.raises(ValueError, match=r"^tasks\.train: the reward of t1 may be a fraction"):
            read_inputs(recipe(place, "allow", choice))


def test_a_files_digest_is_of_the_ids_in_their_order(several: Path) -> None:
    before = read_inputs(recipe(several, "allow")).task_digests
    assert before.keys() == {"sources.lang.tasks", "sources.tools.tasks"}
    write_tasks(several / "train.jsonl", [replace(TRAIN[0], problem="other words"), TRAIN[1]])
    assert read_inputs(recipe(several, "allow")).task_digests == before
    write_tasks(several / "train.jsonl", [*reversed(TRAIN)])
    after = read_inputs(recipe(several, "allow")).task_digests
    assert {key for key in before if after[key] != before[key]} == {"sources.lang.tasks"}
