"""What every source has in common: which rows are taken, how all that will not do are told of, and the split."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.taskfile import (
    EXPECTED,
    Verification,
    fingerprint,
    gold_path,
    read_gold,
    read_tasks,
    read_verified,
    verified_path,
    write_tasks,
    write_verified,
)
from tests.workers.tasksets.published import FIXTURES, fixture_rows, imported, write_lines
from workers.tasksets.__main__ import main
from workers.tasksets.rows import Fields, read_rows
from workers.tasksets.sources import SOURCES

ROW = fixture_rows("swe_bench/verified.jsonl")[0]
BAD = {
    "no repo": ROW | {"repo": None},
    "no grader": ROW | {"eval_script": "true\n"},
    "no problem": ROW | {"problem_statement": " "},
    "bad tests": ROW | {"FAIL_TO_PASS": "["},
    "a list": [ROW],
    "cut": '{"instance_id": ',
    "twice": ROW | {"instance_id": "first"},
}


def row(instance_id: str, **changes: Any) -> dict[str, Any]:
    return ROW | {"instance_id": instance_id} | changes


def lines(path: Path, *rows: object) -> Path:
    return write_lines(path / "rows.jsonl", *rows)


def ids(tmp_path: Path, rows: Path, *options: str) -> list[str]:
    return list(imported(tmp_path, "swe-bench", rows, *options))


def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Path, *options: str, status: int = 1
) -> str:
    out = tmp_path / "refused.jsonl"
    assert main(["import", "swe-bench", str(rows), "--out", str(out), *options]) == status
    assert not out.exists()
    assert not gold_path(out).exists()
    return capsys.readouterr().err


@settings(
    max_examples=40,
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(kinds=st.lists(st.sampled_from(["good", *BAD]), max_size=8))
def test_exactly_the_bad_rows_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: list[str]
) -> None:
    rows = [row("first")] + [
        row(f"good-{i}") if kind == "good" else BAD[kind] for i, kind in enumerate(kinds)
    ]
    path = lines(tmp_path, *rows)
    bad = [number for number, kind in enumerate(kinds, 2) if kind != "good"]
    if not bad:
        assert len(ids(tmp_path, path)) == len(rows)
        return
    *told, last = refused(tmp_path, capsys, path).splitlines()
    assert [line.split(": ")[0] for line in told] == [f"{path}:{number}" for number in bad]
    assert last == f"{len(bad)} refused; nothing was written"


def test_rows_of_another_source_are_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines(tmp_path, row("a"), row("b"))
    assert main(["import", "r2e-gym", str(rows), "--out", str(tmp_path / "t.jsonl")]) == 1
    *told, last = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert last.startswith("2 refused, all there are: they look like rows of swe-bench")


PUBLISHED = {
    "swe-bench": "swe_bench/verified.jsonl",
    "swe-gym": "swe_gym/subset.jsonl",
    "r2e-gym": "r2e_gym/rows.jsonl",
    "swe-smith": "swe_smith/rows.jsonl",
    "swe-bench-pro": "swe_bench_pro/rows.jsonl",
    "swe-rebench": "swe_rebench/first.jsonl",
    "multi-swe-bench": "multi_swe_bench/rows.jsonl",
}
# The rows of SWE-bench Pro are published without these.
SCRIPTS = {"run_script": "pytest\n", "parser": "print()\n"}


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "harbor"])  # task.toml names it
def test_an_image_that_a_row_names_comes_before_any_rule_whatever_the_column(source: str) -> None:
    importer = SOURCES[source]
    path = FIXTURES / PUBLISHED.get(source, source)
    published = importer.read(path, None)[0] if source == "fleet" else read_rows(path)[0]
    names = {"image": "by.example/image:1", "image_name": " image_name:2 ", "docker_image": "docker_image:3"}
    row: dict[str, Any] = {**published.values, **SCRIPTS, **names}
    for column, name in names.items():
        assert importer.task_of(Fields("rows.jsonl:1", row))[0].image == name.strip()
        row[column] = None


def test_solutions_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    tasks = imported(tmp_path, "swe-bench", lines(tmp_path, row("a")))
    assert "default=default" in tasks["a"][1].patch
    assert "default=default" not in (tmp_path / "tasks.jsonl").read_text()


def test_an_unknown_source_is_misuse_and_the_known_ones_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["import", "swe-bank", "rows.jsonl", "--out", "t.jsonl"])
    told = capsys.readouterr().err
    assert all(source in told for source in SOURCES)
    assert SOURCES.keys() == {
        "fleet", "swe-bench", "swe-gym", "r2e-gym", "swe-smith", "swe-bench-pro", "swe-rebench",
        "multi-swe-bench", "harbor"
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["import"],
        ["import", "fleet", "tasks"],
        ["import", "fleet", "tasks", "--out", "t", "--first", "0"],
        ["import", "fleet", "tasks", "--out", "t", "--max-bytes", "many"],
        ["split", "tasks.jsonl"],
        ["split", "tasks.jsonl", "--heldout", "1.5"],
        ["split", "tasks.jsonl", "--heldout", "0"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_misuse(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_rows_are_picked_by_id_repository_size_and_number(tmp_path: Path) -> None:
    long = "x" * 2000
    path = lines(
        tmp_path,
        row("a", repo="django/django"),
        row("b", repo="Django/channels", problem_statement=long),
        row("c", repo="acme/units"),
        row("d", repo="acme/units"),
    )
    (tmp_path / "ids").write_text("d\n\nswe-bench:a\n")
    assert ids(tmp_path, path) == ["a", "b", "c", "d"]
    assert ids(tmp_path, path, "--first", "2") == ["a", "b"]
    assert ids(tmp_path, path, "--first", "9") == ["a", "b", "c", "d"]
    assert ids(tmp_path, path, "--only", "d, swe-bench:b") == ["b", "d"]
    assert ids(tmp_path, path, "--only", f"@{tmp_path / 'ids'}") == ["a", "d"]
    assert ids(tmp_path, path, "--repo", "django/*") == ["a", "b"]
    assert ids(tmp_path, path, "--repo", "*/django", "--repo", "acme/*") == ["a", "c", "d"]
    assert ids(tmp_path, path, "--max-bytes", "2000") == ["a", "c", "d"]
    assert ids(tmp_path, path, "--repo", "acme/*", "--first", "1") == ["c"]


def test_rows_that_were_not_asked_for_need_not_do(tmp_path: Path) -> None:
    path = lines(tmp_path, row("a"), row("b", eval_script=None, repo="not/known"))
    assert ids(tmp_path, path, "--only", "a") == ["a"]


def test_a_row_that_cannot_be_read_is_refused_whatever_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(tmp_path, capsys, lines(tmp_path, row("a"), "{"), "--only", "a", "--repo", "*")
    assert "rows.jsonl:2: not JSON" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "a,nowhere,gone"], "--only: no row has the id gone, nowhere"),
        (["--only", ","], "--only ,: no ids in it"),
        (["--only", "@nowhere"], "nowhere"),
        (["--repo", "django/*"], "none of 1 rows is left by --repo"),
        (["--max-bytes", "1", "--first", "3"], "none of 1 rows is left by --max-bytes, --first"),
        (["--split", "dev"], "--split dev: there are no splits in it"),
    ],
)
def test_filters_that_leave_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in refused(tmp_path, capsys, lines(tmp_path, row("a")), *options, status=2)


def test_a_place_that_cannot_be_written_to_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_file").touch()
    out = tmp_path / "a_file/tasks.jsonl"
    assert main(["import", "swe-bench", str(lines(tmp_path, row("a"))), "--out", str(out)]) == 2
    assert f"{out.parent}: File exists" in capsys.readouterr().err


def test_a_task_file_says_which_line_is_no_task(tmp_path: Path) -> None:
    imported(tmp_path, "swe-bench", lines(tmp_path, row("a")))
    out = tmp_path / "tasks.jsonl"
    tasks = read_tasks(out)
    out.write_bytes(out.read_bytes() + b'{"id": 5}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: not a Task: .*\$\.id"):
        read_tasks(out)
    with pytest.raises(ValueError, match="two tasks have the id"):
        write_tasks(out, tasks * 2)


def split(path: Path, *options: str) -> tuple[list[str], list[str]]:
    assert main(["split", str(path), *options]) == 0
    parts = (path.with_name(f"tasks.{name}.jsonl") for name in ("train", "heldout"))
    train, heldout = ([task.id for task in read_tasks(part)] for part in parts)
    return train, heldout


def test_both_sides_of_a_split_keep_what_was_verified(tmp_path: Path) -> None:
    imported(tmp_path, "swe-bench", lines(tmp_path, *(row(letter) for letter in "abcd")))
    path = tmp_path / "tasks.jsonl"
    verified = [
        Verification(
            task=task.id,
            fingerprint=fingerprint(task),
            states=EXPECTED,
            ok=True,
            reason="",
            verdict_kind="swebench_log",
            seconds=1.0,
            verified_at=0.0,
        )
        for task in read_tasks(path)[1:]
    ]
    write_verified(verified_path(path), verified)
    for name, ids_ in zip(("train", "heldout"), split(path, "--heldout", "2"), strict=True):
        part = verified_path(path.with_name(f"tasks.{name}.jsonl"))
        assert read_verified(part) == {one.task: one for one in verified if one.task in ids_}


def test_a_split_shares_no_task_and_keeps_to_its_seed(tmp_path: Path) -> None:
    every = [f"swe-bench:{letter}" for letter in "abcdefghij"]
    imported(tmp_path, "swe-bench", lines(tmp_path, *(row(letter) for letter in "abcdefghij")))
    path = tmp_path / "tasks.jsonl"
    train, heldout = split(path, "--train", "5", "--heldout", "3")
    assert (len(train), len(heldout)) == (5, 3)
    assert not set(train) & set(heldout)
    assert train == sorted(train)
    assert read_gold(path.with_name("tasks.train.gold.jsonl")).keys() == set(train)
    assert split(path, "--heldout", "3")[1] == heldout
    assert {tuple(split(path, "--heldout", "0.3", "--seed", str(seed))[1]) for seed in range(5)} != {
        tuple(heldout)
    }
    train, heldout = split(path, "--heldout", "0.3")
    assert sorted(train + heldout) == every
    write_tasks(path, reversed(read_tasks(path)))
    assert sorted(split(path, "--heldout", "3")[1]) == heldout


@pytest.mark.parametrize(
    "options", [["--train", "8", "--heldout", "3"], ["--heldout", "0.01"], ["--heldout", "10"]]
)
def test_a_split_that_tasks_do_not_suffice_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    imported(tmp_path, "swe-bench", lines(tmp_path, *(row(letter) for letter in "abcdefghij")))
    assert main(["split", str(tmp_path / "tasks.jsonl"), *options]) == 2
    assert "10 tasks cannot be divided into" in capsys.readouterr().err
    assert not (tmp_path / "tasks.train.jsonl").exists()


def test_an_import_makes_the_directory_that_it_writes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tasks.jsonl"
    assert main(["import", "fleet", str(FIXTURES / "fleet"), "--out", str(out)]) == 0, capsys.readouterr().err
    assert len(read_tasks(out)) == 2


def test_what_a_row_says_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;title\x07\u202e\nsecond row"
    bad = [
        row(hostile),
        row(hostile),
        row("a", repo=hostile, FAIL_TO_PASS="["),
        row("b", problem_statement=hostile + "]", version={}),
    ]
    told = refused(tmp_path, capsys, lines(tmp_path, *bad))
    assert [text for text in ("\x1b", "\x07", "\u202e", "\nsecond") if text in told] == []
    tasks = imported(tmp_path, "swe-bench", lines(tmp_path, row(hostile)))
    assert list(tasks) == [hostile]
