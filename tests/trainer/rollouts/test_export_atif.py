"""Exported ATIF documents: valid by models that others wrote, every sampled token in one step with its id and log-prob, nothing hidden."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atif
import pytest
from msgspec.structs import replace

from benchmarks.scripted_fleet import with_digests
from pipeline.chat import ChatMessage, ToolCall
from pipeline.judge import judgement_head
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim
from pipeline.trajectory import Action, Cut, Failed, Observation, Trajectory, Turn, Usage, reply_digest
from tests.pipeline import samples
from tests.pipeline.judging import judge_request, judgement
from tests.trainer.rollouts.test_export import OPENING, TOOL_AGENT, failed, rollout
from tests.trainer.trajectories import turn
from tests.workers.foreign.program import LS, playing, result, user
from tests.workers.policy.templates import renderer
from tests.workers.policy.test_context import QWEN, play
from trainer.records.rollout_writer import RolloutWriter
from trainer.rollouts.__main__ import main
from trainer.rollouts.export_atif import VERSIONS

Json = dict[str, Any]
Export = Callable[..., dict[str, Json]]

SECRET = "tests/test_hidden.py::test_the_second_argument"
HOSTILE = {
    "nul and escape": "a\x00b\x1b[2Jc",
    "other order": "\u202egnp.exe\u2066\u200b\ufeff\u2028",
    "outside the basic plane": "\U0001f600\U000e0001\uffff",
    "quotes": '"\\"}]}\n\r\t</script>',
    "1 MB": "x\u20ac" * 500_000,
}


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Stores rollouts, exports them, and returns the documents by file name, each after it was found valid."""

    def run(
        rollouts: list[Trajectory], *words: str, scores: tuple[float | None, ...] = ()
    ) -> dict[str, Json]:
        writer = RolloutWriter(tmp_path / "run" / "rollouts", max_bytes=10**9)
        for one in rollouts:
            writer.add_trajectory(one)
        if scores:
            asked = replace(judge_request("a.judge"), rollout_id=rollouts[0].claim.request.id)
            verdict = judgement(Claim(request=asked, attempt=1, worker="judge/1", claimed_at=1.0), *scores)
            writer.add_judgement(judgement_head(verdict, 1), verdict)
        writer.close()
        out = tmp_path / "out"
        flags = ["--format", "atif", "--out", str(out), *words]
        assert main(["export", str(tmp_path / "run"), *flags]) == 0, capsys.readouterr()
        texts = {path.name: path.read_text() for path in sorted(out.iterdir())}
        for text in texts.values():
            atif.Trajectory.model_validate_json(text)
        return {name: json.loads(text) for name, text in texts.items()}

    return run


def acting(text: str, *actions: Action, **fields: Any) -> Turn:
    return replace(turn([1, 2], [3, 4], kept=0), text=text, actions=actions, **fields)


def tool_calls() -> Trajectory:
    """Of a reply with three calls, one of which is malformed, and one with a call that nobody answered."""
    calls = (
        ToolCall(name="bash", arguments='{"command": "ls"}', id="call-1"),
        ToolCall(name="bash", arguments='{"command": "ls', id="call-2"),
        ToolCall(name="bash", arguments='{"command": "pwd"}'),
    )
    first = samples.turn(
        told=OPENING,
        reply=ChatMessage("assistant", "I look.", reasoning="Where is it?", tool_calls=calls),
        actions=(
            replace(samples.action("ls", "calc.py"), tool_call_id="call-1"),
            samples.action("pwd", "/workspace"),
        ),
    )
    told = (
        ChatMessage("tool", "<malformed>", tool_call_id="call-2"),
        ChatMessage("tool", "<out>calc.py</out>", tool_call_id="call-1"),
        ChatMessage("tool", "<out>/workspace</out>"),
        ChatMessage("user", "go on"),
    )
    last = replace(turn([8], [9], kept=7), told=told, actions=(samples.action("pytest", "1 passed"),))
    return rollout("a", turns=with_digests((first, last)), request={"agent_config": TOOL_AGENT})


def cut() -> Trajectory:
    """Of three turns, the last of which sees the first two tokens and not the turn before it."""
    turns = (
        acting("first", samples.action("ls", "calc.py"), told=OPENING),
        replace(turn([5], [6, 7], kept=4), text="second", told=(ChatMessage("user", "<out>calc.py</out>"),)),
        replace(
            turn([8, 9], [10], kept=2),
            text="third",
            told=(ChatMessage("user", "[1 turn left out]"), ChatMessage("user", "no command")),
            cut=Cut(num_omitted=1, marker="[1 turn left out]", forgot_reply=True),
        ),
    )
    return rollout("a", turns=with_digests(turns))


def tree() -> Trajectory:
    """Of an agent program: a title, which is an aside, and a conversation that goes on in two ways."""
    told = ("title?", "mend it", "first", "second", "go on")
    after, asides = (-1, -1, 1, 1, 2), (True, False, False, False, False)
    turns = tuple(
        replace(
            turn([number, 2], [3, 4 + number], kept=0 if parent < 0 else 4 if parent == 1 else 8),
            after=parent,
            aside=aside,
            told=(ChatMessage("user", text),),
            text=text.upper(),
            asked_at=1_700_000_000.0 + number,
        )
        for number, (parent, aside, text) in enumerate(zip(after, asides, told, strict=True))
    )
    return rollout("a", turns=with_digests(turns))


def broken() -> Trajectory:
    """That of a worker whose grader broke after a reply."""
    why = Failed(boundary="grader", message=f"no verdict: {SECRET} failed", transient=True)
    return rollout("a", turns=with_digests((acting("a", told=OPENING),)), outcome=why, reward=None)


def foreign() -> Trajectory:
    """That of a model behind a server, which returns no ids."""
    replies = [
        replace(
            turn([], [], kept=0), text="a", told=OPENING, usage=Usage(prompt_tokens=9, completion_tokens=2)
        ),
        replace(turn([], [], kept=0), text="b", told=(ChatMessage("user", "no command"),)),
    ]
    return rollout("a", turns=tuple(replies))


def played() -> Trajectory:
    """An episode that did not fit the context, as the real loop cuts it."""
    replies = [f"<think>why?</think>reply {number} " + "dam " * 10 for number in range(9)]
    seen = [f"seen {number} " + "mice " * 10 for number in range(9)]
    return rollout("a", turns=tuple(play(renderer(QWEN), replies, seen, context_tokens=500).turns))


KINDS: dict[str, Callable[[], Trajectory]] = {
    "plain": lambda: replace(rollout("a"), turns=with_digests(rollout("a").turns)),
    "nothing sampled": lambda: failed("a"),
    **{make.__name__: make for make in (tool_calls, cut, tree, broken, foreign, played)},
}


def documents(files: dict[str, Json]) -> list[Json]:
    """Every document, also those that are embedded."""
    return [
        one for document in files.values() for one in (document, *document.get("subagent_trajectories", ()))
    ]


def sampled(files: dict[str, Json]) -> dict[int, Json]:
    """The steps with metrics by turn. No turn may have two."""
    steps = [step for one in documents(files) for step in one["steps"] if "metrics" in step]
    found = {step["extra"]["turn"]: step for step in steps}
    assert len(found) == len(steps)
    return found


def keys(value: Any) -> Iterator[str]:
    """The keys of all objects but what is in an `extra`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key != "extra":
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_version_is_valid_and_has_no_field_that_is_younger(
    export: Export, kind: str, version: str
) -> None:
    given = KINDS[kind]()
    files = export([given], "--atif-version", version, "--prompt-ids")
    assert {one["schema_version"] for one in documents(files)} == {f"ATIF-v{version}"}
    since = {
        **dict.fromkeys(("is_copied_context", "tool_definitions"), "1.5"),
        **dict.fromkeys(("trajectory_id", "subagent_trajectories", "llm_call_count"), "1.7"),
    }
    assert not {key for one in files.values() for key in keys(one) if since.get(key, "") > version}
    steps = [step for one in documents(files) for step in one["steps"]]
    results = [result for step in steps for result in step.get("observation", {}).get("results", ())]
    facts = [result.get("extra", {}) for result in results]
    if version < "1.7":
        assert not any(facts)
        facts = [one for step in steps for one in step.get("extra", {}).get("results", ())]
    exit_codes = [one.get("exit_code") for one in facts]
    acted = [action for one in given.turns for action in one.actions if action.observation]
    assert exit_codes.count(0) == len(acted), "the facts of a result are in some extra, whatever the version"
    assert sorted(sampled(files)) == list(range(len(given.turns)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("foreign", "nothing sampled")])
@pytest.mark.parametrize("version", ["1.4", "1.8"])
def test_prompt_ids_and_log_probs_are_those_that_the_engine_held(
    export: Export, kind: str, version: str
) -> None:
    given = KINDS[kind]()
    with_prompts = sampled(export([given], "--atif-version", version, "--prompt-ids"))
    without = sampled(export([given], "--atif-version", version))
    held: dict[int, list[int]] = {-1: []}
    for number, one in enumerate(given.turns):
        metrics, extra = with_prompts[number]["metrics"], with_prompts[number]["metrics"]["extra"]
        prompt, ids = metrics["prompt_token_ids"], metrics["completion_token_ids"]
        assert pack_int32s(ids) == one.sampled
        assert pack_float32s(metrics["logprobs"]) == one.logprobs
        assert (metrics["prompt_tokens"], metrics["completion_tokens"]) == (len(prompt), len(ids))
        assert reply_digest(pack_int32s(prompt), one.sampled, one.logprobs) == one.digest
        assert extra["digest"] == one.digest.hex()
        assert "prompt_token_ids" not in without[number]["metrics"]
        before = held[with_prompts[number]["extra"]["after"]]
        assert before[: extra["kept_tokens"]] + extra["fed_token_ids"] == prompt, "also without the option"
        held[number] = prompt + ids


def test_a_conversation_reads_as_it_was(export: Export) -> None:
    document = export([rollout("a")])["a.json"]
    first, last = document["steps"][2:]
    assert [(one["source"], one["message"]) for one in document["steps"][:2]] == [
        ("system", "You fix bugs."),
        ("user", "add() drops its second argument"),
    ]
    assert first["message"] == samples.turn().text
    assert [(one["tool_call_id"], one["arguments"]) for one in first["tool_calls"]] == [
        ("turn-0-call-0", {"command": "cat calc.py"})
    ]
    (result,) = first["observation"]["results"]
    assert (result["source_call_id"], result["content"]) == ("turn-0-call-0", "<output>calc.py</output>")
    assert result["extra"] == {"exit_code": 0, "dropped_chars": 0, "wall_s": 0.1}
    assert (last["message"], last["metrics"]["logprobs"]) == ("done", [-0.5])
    extra = document["extra"]
    assert [
        extra[key] for key in ("request_id", "task_id", "group_id", "reward", "resolved", "decided_by")
    ] == [*("a", "demo:calc-7", "g0", 1.0, True, "exit_code 0")]
    assert document["final_metrics"] == {
        "total_prompt_tokens": 13,
        "total_completion_tokens": 4,
        "total_steps": 4,
    }
    assert "notes" not in document


def test_tool_calls_and_their_results_are_joined_by_id(export: Export) -> None:
    document = export([tool_calls()])["a.json"]
    first, user, last = document["steps"][2:]
    assert document["agent"]["tool_definitions"][0]["function"]["name"] == "bash"
    assert (first["message"], first["reasoning_content"]) == ("I look.", "Where is it?")
    assert [(one["tool_call_id"], one["arguments"]) for one in first["tool_calls"]] == [
        ("call-1", {"command": "ls"}),
        ("call-2", {}),
        ("turn-0-call-2", {"command": "pwd"}),
    ]
    assert first["extra"]["malformed_arguments"] == {"call-2": '{"command": "ls'}
    assert {one["source_call_id"]: one["content"] for one in first["observation"]["results"]} == {
        "call-1": "<out>calc.py</out>",
        "call-2": "<malformed>",
        "turn-0-call-2": "<out>/workspace</out>",
    }
    assert (user["source"], user["message"]) == ("user", "go on")
    (unshown,) = last["observation"]["results"]
    assert (unshown["content"], unshown["extra"]["was_shown"]) == ("1 passed", False)


def test_a_failed_rollout_has_no_reward_and_says_so(export: Export) -> None:
    files = export([failed("a"), replace(broken(), claim=rollout("b").claim)])
    for name, end in (("a.json", "SandboxError"), ("b.json", "GraderError")):
        extra = files[name]["extra"]
        assert (extra["reward"], extra["resolved"], extra["exit_status"]) == (None, None, end)
        assert files[name]["notes"] == "The rollout failed, so it has no reward."
    (step,) = files["a.json"]["steps"]
    assert (step["source"], step["message"]) == (
        "system",
        "The episode ended before the policy was asked: SandboxError",
    )


def test_a_cut_is_noted_and_is_in_its_step(export: Export) -> None:
    document = export([cut()])["a.json"]
    assert document["notes"].startswith("The prompts of turns [2] do not extend those before them")
    assert [one["extra"].get("cut") for one in document["steps"] if one["source"] == "agent"] == [
        None,
        None,
        {"num_omitted": 1, "marker": "[1 turn left out]", "forgot_reply": True},
    ]


def said(document: Json, copied: bool) -> list[str]:
    return [one["message"] for one in document["steps"] if one.get("is_copied_context", False) == copied]


def test_each_conversation_is_a_document_and_what_they_share_is_marked_as_a_copy(export: Export) -> None:
    main_one, title, branch = documents(export([tree()]))
    assert said(main_one, copied=False) == ["mend it", "MEND IT", "first", "FIRST", "go on", "GO ON"]
    assert said(title, copied=False) == ["title?", "TITLE?"]
    assert title["steps"][1]["extra"]["aside"]
    assert said(branch, copied=True) == ["mend it", "MEND IT"]
    assert said(branch, copied=False) == ["second", "SECOND"]
    assert "Turns [1] are copies" in branch["notes"]
    assert [one["trajectory_id"] for one in (main_one, title, branch)] == ["a", "a#2", "a#3"]
    assert main_one["steps"][1]["timestamp"] == "2023-11-14T22:13:21+00:00"


async def test_each_prompt_of_an_agent_program_is_in_one_step_of_one_conversation(export: Export) -> None:
    async with playing("A title", LS, "one way", LS, "another way") as program:
        await program.chat([user("Name it.")], tools=())
        told = [user("mend it")]
        first = await program.chat(told)
        await program.chat([*told, first, *result(first, "a.py")])
        second = await program.chat([*told, first, *result(first, "b.py")])
        await program.chat([*told, first, *result(first, "b.py"), second, *result(second, "c.py")])
        turns, prompts = program.turns(), program.sampler.prompts
    files = export([rollout("a", turns=turns)], "--prompt-ids")
    steps = sampled(files)
    assert [steps[number]["metrics"]["prompt_token_ids"] for number in range(5)] == [
        prompts[number] for number in range(5)
    ]
    branches = documents(files)
    assert [len(one["steps"]) for one in branches] == [4, 2, 3]
    shown = [one["steps"][1]["observation"]["results"][0]["content"] for one in (branches[0], branches[2])]
    assert shown == ["b.py", "a.py"], "the shared reply has the result that each conversation went on with"


def test_before_documents_could_be_embedded_each_conversation_is_a_file(export: Export) -> None:
    files = export([tree()], "--atif-version", "1.6")
    assert sorted(files) == ["a.conversation-2.json", "a.conversation-3.json", "a.json"]
    assert [files[name]["extra"]["conversation"] for name in sorted(files)] == [2, 3, 1]
    assert {one["session_id"] for one in files.values()} == {"a"}


def test_nothing_of_the_hidden_tests_is_exported(export: Export) -> None:
    given = samples.reward(
        decided_by=f"exit_code 1 [{SECRET}]",
        tests={SECRET: "failed"},
        log_tail=f"FAILED {SECRET}",
        control="confirmed",
    )
    files = export([rollout("a", reward=given), replace(broken(), claim=rollout("b").claim)])
    assert files["a.json"]["extra"]["control"] == "confirmed"
    assert files["a.json"]["extra"]["decided_by"] == "exit_code 1"
    assert "test_the_second_argument" not in json.dumps(files)


def test_scores_of_a_judge_are_in_the_steps(export: Export) -> None:
    steps = [
        one for one in export([rollout("a")], scores=(None, -0.5))["a.json"]["steps"] if "metrics" in one
    ]
    assert ["step_score" in one["extra"] for one in steps] == [False, True], "an abstention is no 0"
    assert steps[1]["extra"]["step_score"] == -0.5


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_comes_back_as_it_was(export: Export, tmp_path: Path, text: str) -> None:
    seen = Observation(exit_code=None, output=text, dropped_chars=0, wall_s=0.1)
    first = acting(text, Action(command=text, observation=seen), told=(ChatMessage("user", text),))
    last = replace(turn([5], [6], kept=4), told=(ChatMessage("user", text),), thread=text[:9])
    opening, step, _ = export([rollout("a", turns=(first, last))])["a.json"]["steps"]
    assert opening["message"] == step["message"] == text
    assert step["tool_calls"][0]["arguments"] == {"command": text}
    assert step["observation"]["results"][0]["content"] == text
    written = (tmp_path / "out" / "a.json").read_text()
    assert not set(written) & set("\x00\x1b\u202e\u2066\u200b\ufeff"), "a terminal shows what the file has"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a":' * 300 + "1" + "}" * 300,
        "[1]",
        "",
        "[" * 10**5,
    ],
    ids=["half a pair", "no number", "too large", "deep", "list", "nothing", "very deep"],
)
def test_arguments_that_not_every_reader_takes_are_kept_as_text(export: Export, arguments: str) -> None:
    reply = ChatMessage("assistant", "", tool_calls=(ToolCall(name="bash", arguments=arguments, id="c"),))
    (step,) = export([rollout("a", turns=(samples.turn(reply=reply, actions=()),))])["a.json"]["steps"]
    assert step["tool_calls"] == [{"tool_call_id": "c", "function_name": "bash", "arguments": {}}]
    assert step["extra"]["malformed_arguments"] == {"c": arguments}


def test_log_probs_that_json_cannot_hold_are_texts(export: Export) -> None:
    odd = replace(acting("a"), logprobs=pack_float32s([-0.5, float("-inf")]))
    metrics = export([rollout("a", turns=(odd,))])["a.json"]["steps"][0]["metrics"]
    assert "logprobs" not in metrics
    assert metrics["extra"]["logprobs"] == ["-0.5", "-inf"]


def test_messages_that_an_agent_program_made_up_are_no_sampled_steps(export: Export) -> None:
    quoted = ChatMessage("assistant", "earlier", tool_calls=(ToolCall(name="sh", arguments="{}", id="old"),))
    told = (*OPENING, quoted, ChatMessage("tool", "out", tool_call_id="old"))
    steps = export([rollout("a", turns=(replace(turn([1], [2], kept=0), told=told),))])["a.json"]["steps"]
    assert [one["source"] for one in steps] == ["system", "user", "agent", "user", "agent"]
    assert steps[2]["extra"]["tool_calls"][0]["id"] == steps[3]["extra"]["tool_call_id"] == "old"
    assert ["metrics" in one for one in steps] == [False, False, False, False, True]


def test_held_out_rollouts_are_exported_only_where_asked_for(export: Export) -> None:
    stored = [rollout("a"), rollout("b", request={"purpose": "eval"})]
    assert [*export(stored)] == ["a.json"]
    assert [*export(stored, "--purpose", "all")] == ["a.json", "b.json"]
