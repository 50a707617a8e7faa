"""Kept rollouts in the shapes of other tools, chosen by reward, task and version, in constant memory."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.judge import judgement_head
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim
from pipeline.rollout_store import segment
from pipeline.trajectory import Failed, Trajectory, VersionSpan
from tests.pipeline import samples
from tests.pipeline.judging import judge_request, judgement
from tests.trainer.trajectories import trajectory, turn
from trainer.records.rollout_writer import RolloutWriter
from trainer.rollouts.__main__ import main

OPENING = (ChatMessage("system", "You fix bugs."), ChatMessage("user", "add() drops its second argument"))
CALL = ToolCall(name="bash", arguments='{"command": "ls"}', id="call-1")
TOOL_AGENT = "agent: {system_template: s, instance_template: '{{task}}'}\nmodel: {observation_template: o}\n"


def rollout(request_id: str, **fields: Any) -> Trajectory:
    """Of two turns, the first by version 3 and the second by `last_version`."""
    last_version = fields.pop("last_version", 4)
    request = samples.request(id=request_id, member=0, group_id="g0", **fields.pop("request", {}))
    claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1.0)
    first = samples.turn(told=OPENING, versions=(VersionSpan(3, 0, 3),))
    second = samples.turn(
        told=(ChatMessage("user", "<output>calc.py</output>"),),
        kept_tokens=7,
        fed=pack_int32s([8, 9]),
        sampled=pack_int32s([10]),
        logprobs=pack_float32s([-0.5]),
        versions=(VersionSpan(last_version, 0, 1),),
        text="done",
        actions=(),
    )
    given: dict[str, Any] = {"turns": (first, second), "finished_at": 1_700_000_000.25}
    return samples.trajectory(claim, **(given | fields))


def failed(request_id: str) -> Trajectory:
    broken = Failed(boundary="sandbox", message="no container", transient=True)
    return rollout(request_id, turns=(), outcome=broken, reward=None)


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    """Stores rollouts, exports them with the words of a command line, and returns where to."""

    def run(rollouts: list[Trajectory], *words: str) -> Path:
        writer = RolloutWriter(tmp_path / "run" / "rollouts", max_bytes=10**9)
        for one in rollouts:
            writer.add_trajectory(one)
        writer.close()
        out = tmp_path / "out"
        assert main(["export", str(tmp_path / "run"), "--out", str(out), *words]) == 0, capsys.readouterr()
        return out

    return run


Export = Callable[..., Path]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_messages_are_plain_chats(export: Export) -> None:
    (row,) = rows(export([rollout("a")], "--format", "messages") / "messages.jsonl")
    assert [one["role"] for one in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert (row["request_id"], row["task_id"], row["reward"]) == ("a", "demo:calc-7", 1.0)
    assert not any("weight" in one for one in row["messages"])


def test_fine_tuning_is_told_which_messages_and_which_tokens_are_trained(export: Export) -> None:
    (row,) = rows(export([rollout("a")], "--format", "sft") / "sft.jsonl")
    assert [one.get("weight") for one in row["messages"]] == [None, None, 1, None, 1]
    assert row["samples"] == [
        {
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            "loss_mask": [0, 0, 0, 0, 1, 1, 1, 0, 0, 1],
            "logprobs": [0, 0, 0, 0, -0.5, -0.25, -1.0, 0, 0, -0.5],
        }
    ]


def test_a_cut_context_is_a_sample_for_each_unbroken_run_with_each_token_trained_once(
    export: Export,
) -> None:
    whole = rollout("a")
    cut = replace(whole, turns=(whole.turns[0], replace(whole.turns[1], kept_tokens=2)))
    (row,) = rows(export([cut], "--format", "sft") / "sft.jsonl")
    assert [one["token_ids"] for one in row["samples"]] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9, 10]]
    assert [one["loss_mask"] for one in row["samples"]] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]


def test_tool_calls_come_with_the_tools(export: Export) -> None:
    reply = ChatMessage("assistant", "", tool_calls=(CALL,))
    called = rollout(
        "a", request={"agent_config": TOOL_AGENT}, turns=(samples.turn(told=OPENING, reply=reply),)
    )
    (row,) = rows(export([called], "--format", "messages") / "messages.jsonl")
    assert row["tools"][0]["function"]["name"] == "bash"
    assert row["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


def test_held_out_rollouts_are_trained_on_only_where_asked_for(export: Export) -> None:
    stored = [rollout("a"), rollout("b", request={"purpose": "eval"})]
    assert [row["request_id"] for row in rows(export(stored, "--format", "sft") / "sft.jsonl")] == ["a"]
    both = export(stored, "--format", "sft", "--purpose", "all") / "sft.jsonl"
    assert [row["request_id"] for row in rows(both)] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "abcd"),
        (("--reward", "1"), "ad"),
        (("--reward", "1", "--reward", "none"), "acd"),
        (("--task", "demo:calc-*"), "abc"),
        (("--task", "*:other", "--reward", "1"), "d"),
        (("--version", "3..5"), "ab"),
        (("--version", "..9"), "abd"),
        (("--version", "4"), ""),
        (("--outcome", "failed:*"), "c"),
        (("--limit", "2"), "ab"),
    ],
)
def test_rollouts_are_chosen_by_reward_task_version_and_outcome(
    export: Export, words: tuple[str, ...], expected: str
) -> None:
    wrong = samples.reward(value=0.0, resolved=False)
    other = replace(samples.TASK, id="demo:other")
    stored = [
        *(rollout("a"), rollout("b", reward=wrong, last_version=5), failed("c")),
        rollout("d", last_version=9, request={"task": other}),
    ]
    table = pq.read_table(export(stored, "--format", "parquet", *words) / "rollouts.parquet")
    assert "".join(table.column("request_id").to_pylist()) == expected


def test_a_table_has_a_row_for_each_rollout(export: Export) -> None:
    out = export([rollout("a"), failed("b")], "--format", "parquet")
    first, second = pq.read_table(out / "rollouts.parquet").to_pylist()
    assert first["messages"][0] == {
        "role": "system",
        "content": "You fix bugs.",
        "reasoning_content": None,
        "tool_calls": None,
        "tool_call_id": None,
    }
    assert (first["exit_status"], first["reward"], first["num_turns"]) == ("Submitted", 1.0, 2)
    assert first["patch"].startswith("--- a/calc.py")
    assert (second["exit_status"], second["reward"], second["error"]) == (
        "SandboxError",
        None,
        "no container",
    )


def test_scores_of_a_judge_go_with_the_rollout_turn_by_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, unjudged = rollout("r-1"), rollout("r-2")
    request = replace(judge_request("r-1.judge"), rollout_id="r-1")
    verdict = judgement(Claim(request=request, attempt=1, worker="judge/1", claimed_at=1.0), None, -0.5)
    writer = RolloutWriter(tmp_path / "run" / "rollouts", max_bytes=10**9)
    for one in (judged, unjudged):
        writer.add_trajectory(one)
    writer.add_judgement(judgement_head(verdict, 1), verdict)
    writer.close()
    for kind in ("sft", "parquet"):
        words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--format", kind]
        assert main(words) == 0, capsys.readouterr()
    lines = {row["request_id"]: row for row in rows(tmp_path / "out" / "sft.jsonl")}
    assert lines["r-1"]["step_scores"] == [None, -0.5], "an abstention is no 0"
    assert "step_scores" not in lines["r-2"]
    table = {
        row["request_id"]: row for row in pq.read_table(tmp_path / "out" / "rollouts.parquet").to_pylist()
    }
    assert (table["r-1"]["step_scores"], table["r-2"]["step_scores"]) == ([None, -0.5], None)


def test_each_conversation_of_an_agent_program_is_a_line_and_each_reply_is_trained_in_one(
    export: Export,
) -> None:
    told = tuple(ChatMessage("user", text) for text in ("title?", "mend it", "first", "second"))
    after, asides = (-1, -1, 1, 1), (True, False, False, False)
    tree = tuple(
        replace(
            turn([1, 2], [3, 4], kept=0 if parent < 0 else 4),
            after=parent,
            aside=aside,
            told=(one,),
            text=one.content.upper(),
        )
        for parent, aside, one in zip(after, asides, told, strict=True)
    )
    given = rollout("a")
    out = export([replace(given, turns=trajectory(*tree).turns)], "--format", "sft")
    found = [
        ([(one["content"], one.get("weight")) for one in row["messages"]], len(row["samples"]))
        for row in rows(out / "sft.jsonl")
    ]
    assert found == [
        ([("title?", None), ("TITLE?", 0)], 2),
        ([("mend it", None), ("MEND IT", 1), ("first", None), ("FIRST", 1)], 0),
        ([("mend it", None), ("MEND IT", 0), ("second", None), ("SECOND", 1)], 0),
    ]


def test_trajectories_are_written_in_both_layouts(export: Export) -> None:
    out = export([rollout("a"), failed("b")], "--format", "traj")
    mini = json.loads((out / "a" / "a.traj.json").read_text())
    assert (mini["trajectory_format"], mini["instance_id"]) == ("mini-swe-agent-1.1", "calc-7")
    assert json.loads((out / "b" / "b.traj.json").read_text())["info"]["exit_status"] == "SandboxError"
    folders = sorted(out.glob("calc-7__*"))
    assert len(folders) == 2
    (folder,) = (one for one in folders if (one / "patch.diff").read_bytes())
    assert folder.name.startswith("calc-7__1700000000250000")
    assert (folder / "patch.diff").read_bytes() == rollout("a").outcome.patch  # type: ignore[union-attr]
    written = json.loads((folder / "traj.json").read_text())
    assert written["trajectory_format"] == "slime-mini-swe-remote-1"
    assert written["info"] | {"swerve": None} == {
        "instance_id": "calc-7",
        "exit_status": "Submitted",
        "error": None,
        "steps": 2,
        "patch_source": "submission",
        "reward": 1.0,
        "eval_result": {"resolved": True, "decided_by": "exit_code 0", "elapsed": 2.0},
        "group_index": "g0",
        "index": 0,
        "swerve": None,
    }
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["sample_prompt"][1]["content"] == "add() drops its second argument"
    assert sorted(meta) == [
        *("group_index", "index", "instance_id", "sample_metadata", "sample_prompt", "sampling_params")
    ]


def test_one_layout_alone_is_written_where_it_is_asked_for(export: Export) -> None:
    out = export([rollout("a")], "--format", "traj", "--layout", "mini")
    assert [path.name for path in out.iterdir()] == ["a"]


def test_an_export_that_is_repeated_replaces_the_first(export: Export) -> None:
    for _ in range(2):
        out = export([rollout("a")], "--format", "traj")
        assert len(list(out.iterdir())) == 2
    for _ in range(2):
        assert len(rows(export([rollout("a")], "--format", "messages") / "messages.jsonl")) == 1


def test_a_name_of_a_task_cannot_lead_out_of_the_folder(export: Export) -> None:
    hostile = replace(samples.TASK, id="demo:../../evil\n/x")
    out = export([rollout("a", request={"task": hostile})], "--format", "traj", "--layout", "slime")
    (folder,) = out.iterdir()
    assert folder.name.startswith("_.._evil_x__")


@pytest.mark.parametrize("format", ["sft", "messages", "parquet", "traj", "atif"])
def test_an_export_holds_few_rollouts_in_memory_at_a_time(
    tmp_path: Path, export: Export, format: str
) -> None:
    writer = RolloutWriter(tmp_path / "run" / "rollouts", max_bytes=10**9)
    for number in range(60):
        writer.add_trajectory(
            rollout(f"r{number}", turns=(samples.turn(told=OPENING, text="x" * 2_000_000),))
        )
    writer.close()
    export([], "--format", format, "--limit", "1")  # imports what it needs
    tracemalloc.start()
    try:
        export([], "--format", format)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 80_000_000, "of 120 million characters"


def test_a_damaged_rollout_is_counted_and_the_rest_exported(
    tmp_path: Path, export: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    export([rollout("a"), rollout("b")], "--format", "messages")
    (path,) = segment.segments_in(tmp_path / "run" / "rollouts")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    capsys.readouterr()
    out = ["--out", str(tmp_path / "out"), "--format", "messages"]
    assert main(["export", str(tmp_path / "run"), *out]) == 1
    assert "1 rollouts in" in (said := capsys.readouterr().out)
    assert "1 damaged" in said


def test_a_directory_without_rollouts_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--format", "sft", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_export_imports_neither_torch_nor_pyarrow_where_it_needs_none() -> None:
    code = "import sys, trainer.rollouts.__main__; print(sorted({'torch', 'pyarrow', 'redis'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in ran.stdout
    assert "pyarrow" not in ran.stdout
