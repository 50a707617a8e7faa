"""A store of rollouts: what is written is found, once, whatever was torn, damaged or removed."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.deadletters import AttemptFailure
from pipeline.request import Claim
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.reading import RolloutStore, Stored
from pipeline.rollout_store.record import StoredRollout
from pipeline.task import ExitCode
from pipeline.trajectory import Failed, Tally, Trajectory, TrajectoryHead, head_of
from tests.pipeline import samples
from trainer.records.rollout_writer import RolloutWriter

MANY_BYTES = 1024**3


def rollout(request_id: str, **fields: Any) -> Trajectory:
    request = samples.request(id=request_id, **fields.pop("request", {}))
    claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1.0)
    return samples.trajectory(claim, **({"finished_at": 5.0} | fields))


def all_in(directory: Path) -> list[Stored]:
    return list(RolloutStore(directory).rollouts(lambda _: True))


def ids_in(directory: Path) -> list[str]:
    return [one.head.head.request_id for one in all_in(directory)]


def written(directory: Path, *ids: str, **budget: int) -> None:
    writer = RolloutWriter(directory, **({"max_bytes": MANY_BYTES} | budget))
    for request_id in ids:
        writer.add_trajectory(rollout(request_id))
    writer.close()


def test_what_was_written_is_found_and_listed_oldest_first(tmp_path: Path) -> None:
    written(tmp_path, "a", "b", "c")
    assert ids_in(tmp_path) == ["a", "b", "c"]
    found = RolloutStore(tmp_path).find("b")
    assert found is not None
    assert found.rollout.trajectory is not None
    assert found.rollout.trajectory.turns == rollout("b").turns
    assert RolloutStore(tmp_path).find("d") is None
    newest_first = RolloutStore(tmp_path).heads(newest_first=True)
    assert [one.head.request_id for one in newest_first] == ["c", "b", "a"]


def test_a_store_is_read_while_it_is_written(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    writer.add_trajectory(rollout("a"))
    assert ids_in(tmp_path) == ["a"]
    assert RolloutStore(tmp_path).find("a") is not None
    writer.close()


def test_a_rollout_is_stored_once_also_by_the_next_process(tmp_path: Path) -> None:
    written(tmp_path, "a", "a", "b")
    written(tmp_path, "b", "a", "c")
    assert ids_in(tmp_path) == ["a", "b", "c"]


def test_a_segment_that_is_being_written_is_not_read_again_for_each_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    names = [f"rollout-{number}" for number in range(50)]
    for name in names[:-1]:
        writer.add_trajectory(rollout(name))
    assert RolloutStore(tmp_path).find(names[-1]) is None
    writer.add_trajectory(rollout(names[-1]))
    heads, head_in = list[object](), record.head_in
    monkeypatch.setattr(record, "head_in", lambda *given: heads.append(given) or head_in(*given))
    assert all(RolloutStore(tmp_path).find(name) for name in names)
    assert len(heads) == len(names) + 1, "each that was looked for, and the one that was new"
    writer.close()


def test_a_run_that_begins_anew_in_its_directory_is_read_anew(tmp_path: Path) -> None:
    for names in (("a", "b"), ("c", "d", "e")):
        writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
        for name in names:
            writer.add_trajectory(rollout(name))
        assert all(RolloutStore(tmp_path).find(name) for name in names)
        assert not RolloutStore(tmp_path).find("z")
        (path,) = segment.segments_in(tmp_path)
        path.unlink()
        with contextlib.suppress(FileNotFoundError):
            writer.close()
        segment.index_path(path).unlink(missing_ok=True)


@pytest.mark.parametrize("is_next_process", [False, True])
def test_a_requeued_request_that_finishes_later_replaces_its_failure(
    tmp_path: Path, is_next_process: bool
) -> None:
    failed = rollout(
        "a", turns=(), reward=None, outcome=Failed(boundary="sandbox", message="gone", transient=True)
    )
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    writer.add_trajectory(failed)
    if is_next_process:
        writer.close()
        writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    assert writer.add_trajectory(rollout("a", finished_at=9.0))
    assert not writer.add_trajectory(failed), "what finished earlier comes too late"
    for _ in range(2):  # before and after the index of the segment is written
        assert [one.head.head.outcome for one in all_in(tmp_path)] == ["submitted"]
        assert [one.head.outcome for one in RolloutStore(tmp_path).heads(newest_first=True)] == ["submitted"]
        found = RolloutStore(tmp_path).find("a")
        assert found is not None
        assert found.head.head.outcome == "submitted"
        writer.close()


@pytest.mark.slow
@given(cut=st.integers(min_value=0))
def test_a_torn_record_costs_itself_only_and_comes_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = tmp_path_factory.mktemp("store")
    written(directory, "a", "b")
    (path,) = segment.segments_in(directory)
    segment.index_path(path).unlink()  # as a kill leaves it
    (_, second) = _offsets(path)
    os.truncate(path, second + cut % (path.stat().st_size - second))
    assert ids_in(directory) == ["a"]
    written(directory, "a", "b", "c")
    assert ids_in(directory) == ["a", "b", "c"]
    assert not any(one.fault for one in all_in(directory))


def test_a_damaged_record_costs_itself_only(tmp_path: Path) -> None:
    written(tmp_path, "a", "b", "c")
    (path,) = segment.segments_in(tmp_path)
    _, second, third = _offsets(path)
    whole = path.read_bytes()
    for place in range(second, third, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        segment.index_path(path).unlink(missing_ok=True)
        sound = [one.head.head.request_id for one in all_in(tmp_path) if not one.fault]
        assert sound == ["a", "c"], place
        written(tmp_path, "a", "b", "c")
        assert ids_in(tmp_path) == ["a", "c", "b"]
        for extra in segment.segments_in(tmp_path)[1:]:
            extra.unlink()
            segment.index_path(extra).unlink()


def test_an_index_that_does_not_fit_is_made_anew(tmp_path: Path) -> None:
    written(tmp_path, "a", "b")
    (path,) = segment.segments_in(tmp_path)
    for damage in (b"", b"nonsense", segment.index_path(path).read_bytes()[:-1]):
        segment.index_path(path).write_bytes(damage)
        assert RolloutStore(tmp_path).find("b") is not None
        written(tmp_path, "a", "b")
        assert segment.read_index(path) is not None
    assert ids_in(tmp_path) == ["a", "b"]


def test_a_store_stays_within_its_bytes_and_loses_the_oldest_first(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(60)]
    budget = 20_000
    writer = RolloutWriter(tmp_path, max_bytes=budget)
    for name in names:
        writer.add_trajectory(rollout(name))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
    writer.close()
    kept = ids_in(tmp_path)
    assert kept == names[-len(kept) :]
    assert 10 < len(kept) < 60
    assert RolloutStore(tmp_path).find(names[0]) is None


def test_a_write_that_fails_leaves_nothing_behind_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    writer.add_trajectory(rollout("a"))
    assert writer._open is not None
    whole = writer._open.file
    monkeypatch.setattr(writer._open, "file", FullDisk(whole))
    with pytest.raises(OSError, match="No space left"):
        writer.add_trajectory(rollout("b"))
    monkeypatch.setattr(writer._open, "file", whole)
    assert ids_in(tmp_path) == ["a"]
    assert writer.add_trajectory(rollout("b"))
    writer.close()
    assert ids_in(tmp_path) == ["a", "b"]


class FullDisk:
    """Takes half of what is written, then no more."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._calls = itertools.count()

    def write(self, data: memoryview) -> int:
        if next(self._calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[: len(data) // 2])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_nothing_of_the_known_fix_or_the_hidden_tests_is_stored(tmp_path: Path) -> None:
    task = replace(
        samples.TASK,
        verdict=ExitCode(eval_script="SECRET", test_patch=b"SECRET", protected_paths=("SECRET",)),
        setup_script="SECRET",
        setup_patch=b"SECRET",
        hidden_paths=("SECRET",),
        calibration=b"SECRET",
        leaking_paths=("SECRET",),
        env={"KEY": "SECRET"},
    )
    reward = samples.reward(
        value=0.0,
        resolved=False,
        decided_by="exit_code 0, but SECRET passes what must fail",
        log_tail="SECRET",
        tests={"SECRET": "PASSED"},
        fail_to_pass=Tally(passed=1, total=2),
    )
    graded = rollout("a", request={"task": task}, reward=reward)
    broken = rollout(
        "b",
        request={"task": task},
        reward=None,
        outcome=Failed(boundary="grader", message="the log ends: SECRET", transient=True),
    )
    evidence = AttemptFailure(
        attempt=1,
        worker="host/1",
        boundary="grader",
        message="the log ends: SECRET",
        transient=True,
        failed_at=2.0,
        detail="SECRET",
    )
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    writer.add(head_of(graded, 0), StoredRollout(trajectory=graded))
    writer.add(head_of(broken, 0), StoredRollout(trajectory=broken, failures=(evidence,)))
    writer.close()
    first, second = all_in(tmp_path)
    assert "SECRET" not in repr((first, second))
    assert first.rollout.trajectory is not None
    assert first.rollout.trajectory.reward is not None
    assert first.rollout.trajectory.reward.fail_to_pass == Tally(passed=1, total=2)
    assert first.rollout.trajectory.claim.request.task.problem == samples.TASK.problem
    assert second.head.is_dead
    assert second.rollout.failures[0].message == "the log ends: (withheld)"


def test_a_head_without_a_body_is_kept(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, max_bytes=MANY_BYTES)
    writer.add(_head("a"), StoredRollout())
    writer.close()
    (stored,) = all_in(tmp_path)
    assert (stored.head.head, stored.rollout.trajectory) == (_head("a"), None)


def _head(request_id: str) -> TrajectoryHead:
    return head_of(rollout(request_id, request={"enqueued_at": 1.0, "group_id": "g", "member": 0}), 0)


def _offsets(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        return iter([entry.offset for entry in segment.entries(file)])
