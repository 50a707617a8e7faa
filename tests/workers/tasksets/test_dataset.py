"""A data set: what joins task files, divides them by repository and by time, and says what is in them."""

import resource
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.rollout_store.reading import DIRECTORY
from pipeline.task import Calibration, ExitCode, Task, pack
from pipeline.taskfile import (
    EXPECTED,
    Gold,
    Strength,
    TaskProvenance,
    Verification,
    fingerprint,
    gold_path,
    provenance_path,
    read_gold,
    read_provenance,
    read_tasks,
    read_verified,
    verified_path,
    write_gold,
    write_provenance,
    write_tasks,
    write_verified,
)
from pipeline.trajectory import Claim
from tests.pipeline import samples
from trainer.records.rollout_writer import RolloutWriter
from workers.tasksets.__main__ import main

FIX = """diff --git a/{path} b/{path}
--- a/{path}
+++ b/{path}
@@ -{line},2 +{line},2 @@ {heading}
     total = {before}
-    return {old}
+    return {new}
"""


def fix(number: int, *, path: str = "price.py", heading: str = "", line: int = 3, old: str = "") -> str:
    """A known fix of its own; `heading` is the function that git names."""
    old = old or f"wrong{number}"
    heading = heading or f"def f{number}():"
    return FIX.format(
        path=path, line=line, heading=heading, before=f"sum{number}", old=old, new=f"right{number}"
    )


def write_dataset(
    path: Path,
    patches: dict[str, str],
    *,
    repo: str = "acme/prices",
    problems: dict[str, str] | None = None,
    authored: str = "2024-05-01T12:00:00+02:00",
    needing: tuple[str, ...] = (),
) -> Path:
    """A verified task file with a task for each patch."""
    tasks = [
        Task(
            id=f"git:{name}",
            repo=repo,
            base_commit="a" * 40,
            image="prices:1",
            workdir="/workspace",
            problem=(problems or {}).get(name, f"Prices of {name} are wrong."),
            verdict=ExitCode(eval_script="python3 -m pytest\n"),
        )
        for name in patches
    ]
    write_tasks(path, tasks)
    write_gold(gold_path(path), (Gold(id=f"git:{name}", patch=patch) for name, patch in patches.items()))
    write_verified(verified_path(path), (verification(task, needing) for task in tasks))
    provenance = TaskProvenance(
        task="",
        repository=repo,
        commit="b" * 40,
        num_commits=1,
        authored=authored,
        licence="LICENSE",
        problem_source="commit message",
        versions_before="",
    )
    write_provenance(provenance_path(path), (replace(provenance, task=task.id) for task in tasks))
    return path


def verification(task: Task, needing: tuple[str, ...]) -> Verification:
    return Verification(
        task=task.id,
        fingerprint=fingerprint(task),
        states=EXPECTED,
        ok=True,
        reason="",
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=0.0,
        calibration=pack(Calibration(passing=needing, needing_fix=needing)),
        num_needing_fix=len(needing),
        control="confirmed",
        strength=Strength(num_partial_fixes=10, passing=("price.py:3: line left out",)),
    )


def ids(path: Path) -> list[str]:
    return [task.id.removeprefix("git:") for task in read_tasks(path)]


def played(directory: Path, rewards: dict[str, list[float]]) -> Path:
    """An evaluation's directory with an episode for each reward."""
    writer = RolloutWriter(directory / DIRECTORY, max_bytes=1024**3)
    for name, values in rewards.items():
        for number, value in enumerate(values):
            task = replace(samples.TASK, id=f"git:{name}")
            request = samples.request(id=f"{name}:{number}", group_id=f"{name}:{number}", task=task)
            claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1.0)
            writer.add_trajectory(samples.trajectory(claim, reward=samples.reward(value=value)))
    writer.close()
    return directory


def test_a_joined_file_has_each_task_once_with_all_that_is_known_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1), "b": fix(2)})
    two = write_dataset(tmp_path / "two.jsonl", {"c": fix(3), "b": fix(2)})
    assert main(["join", str(one), str(two), "--out", str(tmp_path / "all.jsonl")]) == 0
    joined = tmp_path / "all.jsonl"
    assert ids(joined) == ["a", "b", "c"]
    names = {"git:a", "git:b", "git:c"}
    assert read_gold(gold_path(joined)).keys() == names
    assert read_verified(verified_path(joined)).keys() == names
    assert read_provenance(provenance_path(joined)).keys() == names
    assert capsys.readouterr().out.splitlines() == ["3 tasks in 2 files", f"3 tasks in {joined}"]


def test_another_task_with_a_known_id_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    two = write_dataset(tmp_path / "two.jsonl", {"a": fix(1)}, problems={"a": "Something else."})
    assert main(["join", str(one), str(two), "--out", str(tmp_path / "all.jsonl")]) == 2
    assert "a different task with the id 'git:a'" in capsys.readouterr().err
    assert not (tmp_path / "all.jsonl").exists()


def test_of_several_verifications_of_a_task_that_of_its_present_form_is_kept(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    two = write_dataset(tmp_path / "two.jsonl", {"a": fix(1)})
    (known,) = read_verified(verified_path(one)).values()
    write_verified(verified_path(two), [replace(known, fingerprint="another form")])
    write_gold(gold_path(two), [Gold(id="git:a", patch=fix(2))])
    for order in ((one, two), (two, one)):
        assert main(["join", *map(str, order), "--out", str(tmp_path / "all.jsonl")]) == 0
        assert read_verified(verified_path(tmp_path / "all.jsonl")) == {"git:a": known}
        assert read_gold(gold_path(tmp_path / "all.jsonl")) == read_gold(gold_path(order[0])), "the first counts"


def test_a_row_of_a_task_that_its_file_does_not_have_says_nothing_of_another_file_s(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    two = write_dataset(tmp_path / "two.jsonl", {"b": fix(2)})
    write_gold(gold_path(one), [Gold(id="git:a", patch=fix(1)), Gold(id="git:b", patch=fix(9))])
    assert main(["join", str(one), str(two), "--out", str(tmp_path / "all.jsonl")]) == 0
    assert read_gold(gold_path(tmp_path / "all.jsonl"))["git:b"].patch == fix(2)


def test_what_is_written_over_another_data_set_has_nothing_of_it(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    verified_path(one).unlink()
    provenance_path(one).unlink()
    out = write_dataset(tmp_path / "all.jsonl", {"b": fix(2)})
    assert main(["join", str(one), "--out", str(out)]) == 0
    assert ids(out) == ["a"]
    assert (read_verified(verified_path(out)), read_provenance(provenance_path(out))) == ({}, {})


def test_an_output_that_cannot_be_written_leaves_the_files_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    two = write_dataset(tmp_path / "two.jsonl", {"b": fix(2)})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (one.stat().st_size, limits[1]))
    try:
        assert main(["join", str(one), str(two), "--out", str(one)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert main(["join", str(one), "--out", str(tmp_path)]) == 2
    assert "a directory; give the name of a file" in capsys.readouterr().err


def test_misuse_is_one_line_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1), "b": fix(2)}, authored="yesterday")
    for words, why in (
        (["report", empty], f"no tasks in {empty}"),
        (["join", empty, "--out", tmp_path / "all.jsonl"], "no task is left, so nothing was written\n"),
        (["split", one, "--heldout", "1", "--by", "time"], "the provenance of git:a has no date: authored: "),
    ):
        assert main([*map(str, words)]) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["split", str(one), "--heldout", "nan"])
    assert "nan is neither a number of tasks nor a share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("patch", "repo", "problem", "why"),
    [
        (fix(1, path="copy/of/price.py", line=90), "other/fork", "Sums are wrong.", "has the fix of"),
        (fix(2), "acme/prices", "Prices  of a\nare wrong.", "has the problem of"),
        (fix(2, heading="def f1():"), "acme/prices", "Sums are wrong.", "has the functions and tests of"),
        (fix(2, heading="def f1():"), "other/shop", "Sums are wrong.", ""),
        (fix(2, heading="def f2():"), "acme/prices", "Sums are wrong.", ""),
        (fix(1, old="other"), "other/fork", "Sums are wrong.", ""),
    ],
)
def test_what_repeats_a_fix_a_problem_or_functions_and_tests_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patch: str, repo: str, problem: str, why: str
) -> None:
    needing = ("test_price.py::test_sum",)
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)}, needing=needing)
    two = write_dataset(
        tmp_path / "two.jsonl", {"b": patch}, repo=repo, problems={"b": problem}, needing=needing
    )
    assert main(["join", str(one), str(two), "--out", str(tmp_path / "all.jsonl")]) == 0
    said = capsys.readouterr().out.splitlines()
    if why:
        assert ids(tmp_path / "all.jsonl") == ["a"]
        assert said[1] == f"-1  {why} another task (such as git:b: git:a)"
    else:
        assert ids(tmp_path / "all.jsonl") == ["a", "b"]


def test_functions_are_compared_only_where_the_same_tests_are_known_to_need_the_fix(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "one.jsonl", {"a": fix(1)})
    two = write_dataset(tmp_path / "two.jsonl", {"b": fix(2, heading="def f1():")})
    assert main(["join", str(one), str(two), "--out", str(tmp_path / "all.jsonl")]) == 0
    assert ids(tmp_path / "all.jsonl") == ["a", "b"]


def test_tasks_that_are_always_or_never_solved_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_dataset(tmp_path / "one.jsonl", {name: fix(number) for number, name in enumerate("abcd")})
    rates = played(tmp_path / "evaluation", {"a": [1, 1], "b": [0, 0], "c": [0, 1]})
    words = [
        "join",
        str(path),
        "--out",
        str(tmp_path / "all.jsonl"),
        "--min-rate",
        "0.1",
        "--max-rate",
        "0.9",
    ]
    assert main([*words, "--rates", str(rates)]) == 0
    assert ids(tmp_path / "all.jsonl") == ["c"]
    assert capsys.readouterr().out.splitlines()[1:-1] == [
        "-1  is solved too often (such as git:a)",
        "-1  is solved too seldom (such as git:b)",
        "-1  was not played (such as git:d)",
    ]
    assert main(words) == 2
    assert "give --rates" in capsys.readouterr().err
    assert main([*words, "--rates", str(tmp_path)]) == 2
    assert "has no rollout with a reward" in capsys.readouterr().err


def test_a_split_by_repository_leaves_no_repository_on_both_sides(tmp_path: Path) -> None:
    for number, repo in enumerate(("a/a", "b/b", "c/c")):
        patches = {f"{repo[0]}{place}": fix(10 * number + place) for place in range(3)}
        write_dataset(tmp_path / f"{number}.jsonl", patches, repo=repo)
    files = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    assert main(["join", *files, "--out", str(tmp_path / "all.jsonl")]) == 0
    chosen: set[str] = set()
    for seed in range(6):
        assert (
            main(
                [
                    "split",
                    str(tmp_path / "all.jsonl"),
                    "--heldout",
                    "2",
                    "--by",
                    "repository",
                    "--seed",
                    str(seed),
                ]
            )
            == 0
        )
        held, train = (
            {one[0] for one in ids(tmp_path / f"all.{name}.jsonl")} for name in ("heldout", "train")
        )
        assert len(ids(tmp_path / "all.heldout.jsonl")) == 3
        assert not held & train
        chosen |= held
    assert len(chosen) > 1, "the seed chooses"


def test_a_split_by_time_holds_out_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "new": "2024-05-01T01:00:00+00:00",
        "older": "2024-05-01T02:00:00+02:00",
        "oldest": "2023-01-01T00:00:00Z",
    }
    for number, (name, authored) in enumerate(times.items()):
        write_dataset(tmp_path / f"{name}.jsonl", {name: fix(number)}, authored=authored)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("oldest", "new", "older")]
    assert main(["join", *files, "--out", str(tmp_path / "all.jsonl")]) == 0
    words = ["split", str(tmp_path / "all.jsonl"), "--heldout", "1", "--by", "time"]
    assert main(words) == 0
    assert (ids(tmp_path / "all.heldout.jsonl"), ids(tmp_path / "all.train.jsonl")) == (
        ["new"],
        ["oldest", "older"],
    )
    assert read_provenance(provenance_path(tmp_path / "all.heldout.jsonl")).keys() == {"git:new"}
    provenance_path(tmp_path / "all.jsonl").unlink()
    assert main(words) == 2
    assert "--by time: no provenance says when git:oldest was made" in capsys.readouterr().err


def test_the_report_has_a_row_for_each_repository_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_dataset(
        tmp_path / "one.jsonl", {"a": fix(1), "b": fix(2)}, needing=("test_price.py::test_sum",)
    )
    two = write_dataset(
        tmp_path / "two.jsonl",
        {"c": fix(1, path="src/price.go")},
        repo="b/b",
        authored="2021-01-01T00:00:00Z",
    )
    rates = played(tmp_path / "evaluation", {"a": [1, 0]})
    words = ["report", str(one), str(two), "--rates", str(rates), "--out", str(tmp_path / "tasks.png")]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 tasks of 2 repositories, 1 of them repeat another",
        "",
        "repository   tasks       lines       files       tests       words      weakness        solved",
        "acme/prices      2  2 (2 to 2)  1 (1 to 1)  1 (1 to 1)  5 (5 to 5)  0.10 (n = 2)  0.50 (n = 1)",
        "b/b              1  2 (2 to 2)  1 (1 to 1)  0 (0 to 0)  5 (5 to 5)  0.10 (n = 1)             -",
        "all              3  2 (2 to 2)  1 (1 to 1)  1 (0 to 1)  5 (5 to 5)  0.10 (n = 3)  0.50 (n = 1)",
        "",
        "language  python 2, go 1",
        "kind      history 3",
        "year      2024 2, 2021 1",
        "control   confirmed 3",
    ]
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")
