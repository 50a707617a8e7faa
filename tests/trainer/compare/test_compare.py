"""Two recipes are told apart as episodes are added, with few false alarms over all looks; errors name what to change."""

import json
import random
from pathlib import Path

import pytest

from pipeline.journal.rows import EvaluationRow
from tests.trainer.evaluate.test_figures import record, row
from trainer.compare import __main__ as compare
from trainer.compare import power
from trainer.compare.looks import Pair, bounds, difference_of, looks
from trainer.compare.power import Noise, needed
from trainer.records.journal_writer import Journal


def evaluated(
    draw: random.Random, first: float, second: float, *, tasks: int = 40, episodes: int = 8
) -> Pair:
    a, b = (
        {str(task): [float(draw.random() < rate) for _ in range(episodes)] for task in range(tasks)}
        for rate in (first, second)
    )
    return a, b


def test_bounds_are_those_of_lan_and_demets() -> None:
    assert bounds([1.0]) == pytest.approx([1.960], abs=1e-3)
    assert bounds([0.2, 0.4, 0.6, 0.8, 1.0]) == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=4e-3)


@pytest.mark.slow
def test_looking_after_each_episode_decides_wrongly_in_at_most_one_of_twenty() -> None:
    draw, num_tries = random.Random(0), 200
    found = [looks([evaluated(draw, 0.5, 0.5)], 8) for _ in range(num_tries)]
    assert sum(one[-1].is_decided for one in found) <= 0.08 * num_tries, (
        "5 %, and three standard errors of 200"
    )
    assert max(map(len, found)) > 3, "it was looked at often"


@pytest.mark.slow
def test_a_true_difference_is_found_and_mostly_before_the_plan_is_used_up() -> None:
    draw, num_tries = random.Random(1), 100
    found = [looks([evaluated(draw, 0.4, 0.5, episodes=12)], 12) for _ in range(num_tries)]
    assert sum(one[-1].low > 0 for one in found) >= 0.7 * num_tries
    assert sum(one[-1].share < 1 for one in found if one[-1].is_decided) > 0.3 * num_tries


def test_runs_of_one_recipe_that_differ_by_their_seeds_are_not_two_recipes() -> None:
    """One pair would call the weights different, and rightly so."""
    draw, num_wrong, num_tries = random.Random(2), 0, 100
    for _ in range(num_tries):
        levels = [(draw.gauss(0.5, 0.1), draw.gauss(0.5, 0.1)) for _ in range(5)]
        pairs = [evaluated(draw, a, b) for a, b in levels]
        num_wrong += looks(pairs, 5)[-1].is_decided
    assert num_wrong <= 0.11 * num_tries


def test_pairs_of_runs_are_draws_beside_tasks() -> None:
    draw = random.Random(3)
    alike = difference_of([evaluated(draw, 0.5, 0.5, tasks=200) for _ in range(4)])
    apart = difference_of([evaluated(draw, *levels, tasks=200) for levels in ((0.3, 0.7), (0.7, 0.3)) * 2])
    assert apart.error > 5 * alike.error
    assert (apart.degrees, alike.degrees >= 3) == (3, True)


def run(directory: Path, success: float, *, tasks: int = 30, name: str = "heldout_after") -> Path:
    rewards = {f"t{task}": (float(task < success * tasks),) * 4 for task in range(tasks)}
    made = EvaluationRow(
        name=name,
        version=1,
        greedy=False,
        success=success,
        num_episodes=4 * tasks,
        num_failed=0,
        rewards=rewards,
    )
    with Journal(directory / "journal") as journal:
        journal.append(made)
    return directory


def test_two_runs_are_compared_on_their_held_out_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run(tmp_path / "a", 0.2), run(tmp_path / "b", 0.8)
    assert compare.main([str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "A  20.0 % (9.5 to 37.3, 95 %)" in printed
    assert "decided: the weights of run B are better" in printed
    assert "one pair of runs says nothing of other seeds" in printed
    more = [str(run(tmp_path / name, success)) for name, success in (("a2", 0.2), ("b2", 0.8))]
    assert compare.main([str(a), str(b), "--pair", *more, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["is_decided"], told["num_pairs"], told["num_tasks"]) == (True, 2, 30)


def test_evaluations_of_models_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        record(
            tmp_path / name,
            *(row(f"t-{task}", task % 2 == 0, sample=n) for task in range(10) for n in range(2)),
        )
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "not decided" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused_with_the_field_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, other = run(tmp_path / "a", 0.5), run(tmp_path / "other", 0.5, tasks=20)
    early = run(tmp_path / "early", 0.5, name="heldout_before")
    old = tmp_path / "old"
    with Journal(old / "journal") as journal:
        journal.append(
            EvaluationRow(
                name="heldout_after", version=1, greedy=False, success=0.5, num_episodes=9, num_failed=0
            )
        )
    for second, complaint in (
        (other, "tasks.heldout: "),
        (early, "it has heldout_before; name one with --evaluation"),
        (old, "has no rewards by task, because an earlier release wrote it"),
    ):
        assert compare.main([str(a), str(second)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line
    for words in ([str(a), str(a)], [str(a), str(other), "--plan", "0"]):
        with pytest.raises(SystemExit) as ended:
            compare.main(words)
        assert ended.value.code == 2
        assert "give" in capsys.readouterr().err


def test_power_says_how_many_tasks_episodes_and_seeds_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = Noise(200, 0.5, 0.125, 0.0, 0.0, 0.0)
    found = needed(noise, detect=0.03, power=0.8, episodes_each=1)
    # (1.96 + 0.84)^2 / 0.03^2 = 8,721 and 4 % more, times 2 * 0.125; unpaired twice 2 * 0.25 of 8,721.
    assert found.tasks[1] == pytest.approx(2268, abs=2)
    assert found.tasks[2] == pytest.approx(1134, abs=2)
    assert found.episodes == 12
    assert found.naive_episodes == pytest.approx(8724, abs=4)
    related = needed(Noise(200, 0.5, 0.125, 0.5, 0.0, 0.0), detect=0.03, power=0.8, episodes_each=1)
    assert related.tasks[1] == pytest.approx(1134, abs=2)
    seeds = needed(Noise(200, 0.5, 0.125, 0.0, 0.0, 0.03), detect=0.03, power=0.8, episodes_each=16).seeds
    assert seeds is not None
    assert 15 <= seeds <= 22
    assert (
        needed(Noise(20, 0.5, 0.125, 0.0, 0.3, 0.0), detect=0.03, power=0.8, episodes_each=1).episodes is None
    )
    assert power.main([str(run(tmp_path / "a", 0.5)), "--detect", "5"]) == 0
    assert "to find 5 points at 80 % power, with 5 % of false alarms" in capsys.readouterr().out
