"""A rank that fails by itself does not hold the others. No launcher watches the two processes, as if each had a machine of its own."""

from pathlib import Path

import msgspec
import pytest

from tests.trainer.forking import start_ranks
from tests.trainer.learner.lone_failure_ranks import Seen
from trainer.learner import directories

pytestmark = pytest.mark.cpu_only

LIMIT_S = 300
"""After which a process is taken for one that hangs."""


RANKS = "tests.trainer.learner.lone_failure_ranks"


@pytest.fixture(scope="module")
def results(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two left behind, of which the second fails in its last step."""
    results = tmp_path_factory.mktemp("raise")
    ranks = start_ranks(2, RANKS, str(qwen3), str(results), "raise", logs=results)
    try:
        statuses = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert 0 not in statuses, "the last step failed"
    return results


@pytest.fixture(scope="module")
def seen(results: Path) -> list[Seen]:
    for rank in range(2):
        assert (results / f"rank-{rank}.json").exists(), (results / f"rank-{rank}.log").read_text()[-4000:]
    return [msgspec.json.decode((results / f"rank-{rank}.json").read_bytes(), type=Seen) for rank in range(2)]


# Quick: a failure on one rank ends no run without its reason.
def test_what_fails_on_one_rank_fails_on_all_with_its_reason_and_they_can_go_on(seen: list[Seen]) -> None:
    assert seen[0].errors == seen[1].errors
    assert seen[0].steps == seen[1].steps
    assert {name: error.split(":")[0] for name, error in seen[0].errors.items()} == {
        "export into a file": "rank 0",
        "export, renamed": "rank 0",
        "export, written": "rank 1",
        "save into a file": "rank 0",
        "save, copied": "rank 1",
        "save, written": "rank 1",
        "save, renamed": "rank 0",
    }
    assert "Not a directory" in seen[0].errors["save into a file"]
    assert "out of memory" in seen[1].errors["save, renamed"]


def test_a_directory_that_another_machine_sees_seconds_later_is_waited_for(seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.left == ["step", "v1"], "and nothing of what failed"


def test_a_rank_that_ends_in_a_step_ends_the_others(results: Path) -> None:
    assert "rank 1 is broken" in (results / "rank-1.log").read_text()
    assert "onnection" in (results / "rank-0.log").read_text(), "closed by the other"


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_ends_the_others_when_the_time_of_a_collective_is_over(
    qwen3: Path, tmp_path: Path
) -> None:
    ranks = start_ranks(2, RANKS, str(qwen3), str(tmp_path), "stick", logs=tmp_path)
    try:
        assert ranks[0].wait(LIMIT_S) != 0
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "Timed out" in (tmp_path / "rank-0.log").read_text()


def test_a_directory_that_is_never_seen_is_an_error_that_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "SEEN_WITHIN_S", 0.2)
    with pytest.raises(FileNotFoundError, match="shared file system"):
        directories.wait_for(tmp_path / "elsewhere" / "v1")
