"""Which patches a file holds, and for which tasks."""

import json
from pathlib import Path

import pytest

from tests.workers.claims import make_task
from workers.grade import matched, read_predictions
from workers.unqueued import TaskIndex

TASKS = [
    make_task("none", id=one)
    for one in ("swe-bench:django__django-1", "gym:calc-2", "rebench:calc-2", "calc-3")
]
PATCH = "diff --git a/a.py b/a.py\n+\u2028 = '\u00e4'\n"
ROWS = [
    {"instance_id": "django__django-1", "model_patch": PATCH},
    {"instance_id": "calc-3", "model_patch": None},
]
EXPECTED = [("django__django-1", PATCH.encode()), ("calc-3", b"")]
INDEX = TaskIndex(Path("tasks.jsonl"), TASKS)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({row["instance_id"]: {"model_name_or_path": "m", **row} for row in ROWS}),
        json.dumps({row["instance_id"]: {"model_patch": row["model_patch"]} for row in ROWS}, indent=2),
        json.dumps(ROWS),
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    ],
    ids=["mini-swe-agent", "by-id", "list", "lines", "lines-of-windows"],
)
def test_predictions_are_read_in_every_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "preds"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_predictions(path) == EXPECTED


def test_a_single_line_is_one_prediction(tmp_path: Path) -> None:
    path = tmp_path / "preds.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    assert read_predictions(path) == EXPECTED[:1]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "preds holds no prediction; it must be"),
        (b"{}", "preds holds no prediction; it must be"),
        (b"[]", "preds holds no prediction; it must be"),
        (b"7", "preds: neither an object nor a list"),
        (b"diff --git a/a.py b/a.py\n", "preds:1: not JSON: Expecting value; each line is one prediction"),
        (b'{"instance_id": "a", "model_patch": ""}\n{"instance_id"\n', "preds:2: not JSON"),
        (b'{"instance_id": "a"}\n{"instance_id": "b"}', 'preds:1: no "model_patch"'),
        (b'{"a": {"patch": ""}}', 'preds: a: no "model_patch"'),
        (b'{"a": "diff"}', 'preds: a: no "model_patch"'),
        (b'{"a": {"model_patch": 7}}', "preds: a: model_patch: not a string"),
        (b'{"a": {"model_patch": "\\ud800"}}', "preds: a: model_patch: surrogates not allowed"),
        (b'[{"model_patch": ""}]', "preds: element 1: instance_id: not a string"),
        (b"\xff", "preds: not UTF-8"),
        (b"[" * 100_000, "preds: nested too deeply"),
    ],
)
def test_what_is_no_prediction_is_refused_with_its_place(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "preds"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011, its text is compared
        read_predictions(path)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_bytes_of_a_patch_that_are_no_utf_8_come_through(tmp_path: Path) -> None:
    path = tmp_path / "preds"
    path.write_text(json.dumps({"a": {"model_patch": b"+\xff\n".decode("utf-8", "surrogateescape")}}))
    assert read_predictions(path) == [("a", b"+\xff\n")]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("swe-bench:django__django-1", "swe-bench:django__django-1"),
        ("django__django-1", "swe-bench:django__django-1"),
        ("gym:calc-2", "gym:calc-2"),
        ("calc-3", "calc-3"),
        ("other", None),
        ("", None),
    ],
)
def test_an_id_may_be_without_its_sources_prefix(given: str, found: str | None) -> None:
    task = INDEX.find(given)
    assert (task.id if task else None) == found


def test_an_id_that_stands_for_two_tasks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'calc-2' names several tasks .* one of gym:calc-2, rebench:calc-2"
    ):
        matched(Path("preds"), [("calc-2", b"")], INDEX)


def test_unknown_ids_are_refused_with_what_ids_look_like() -> None:
    with pytest.raises(
        ValueError, match=r"preds: 'a', 'b': no such task in tasks\.jsonl; .* like 'swe-bench:django"
    ):
        matched(Path("preds"), [("a", b""), ("calc-3", b""), ("b", b"")], INDEX)


def test_two_patches_for_one_task_are_refused() -> None:
    with pytest.raises(
        ValueError, match="preds: two predictions for swe-bench:django__django-1: leave one of them out"
    ):
        matched(Path("preds"), [("django__django-1", b""), ("swe-bench:django__django-1", b"")], INDEX)
