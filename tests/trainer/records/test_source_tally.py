"""What report and console say of each source of tasks."""

import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.intervals import Estimate
from pipeline.journal.rows import EpisodeRow, Fate
from tests.trainer.journals import Run
from tests.trainer.records.test_console import row
from trainer.records.console import Console, LineConsole, TableConsole
from trainer.records.source_tally import tally_of
from trainer.report import __main__ as report

RECIPE = """
name = "r"
model = "m"
num_steps = 3
rollout = { group_size = 2, agent = "agent.yaml" }
batch.groups_per_step = 2
learner = { lr = 1e-6, micro_batch_tokens = 32768 }
sources = [{ name = "lang", tasks = "a.jsonl", share = 3 }, { name = "tools", tasks = "b.jsonl", share = 1 }]
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with two groups of the first source, of which one was trained, and one of the second."""
    run = Run(tmp_path)
    ids = add(run, "lang", 0, [1.0, 0.0])
    add(run, "lang", 1, [0.0, None], fate="zero_variance")
    ids += add(run, "tools", 2, [1.0, 1.0])
    add(run, "tools", 3, [0.0, 0.0], fate="withdrawn")
    run.step(1, ids)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return run


def add(run: Run, source: str, cursor: int, rewards: list[float | None], fate: Fate = "trained") -> list[str]:
    ids = run.group(cursor, rewards, fate=fate)
    run.rows[-len(rewards) :] = [
        replace(one, source=source) for one in run.rows[-len(rewards) :] if isinstance(one, EpisodeRow)
    ]
    return ids


def episodes(run: Run) -> list[EpisodeRow]:
    return [one for one in run.rows if isinstance(one, EpisodeRow)]


def test_the_report_has_a_table_of_what_each_source_was_asked_for_finished_and_trained(run: Run) -> None:
    run.write()
    lines = report.table(report.summarize(run.directory), run.directory).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("source "))
    lang, tools = lines[place + 1].split(), lines[place + 2].split()
    assert lang[:10] == ["lang", "75.0%", "2", "(66.7%)", "1", "(50.0%)", "4", "(66.7%)", "2", "(50.0%)"]
    assert tools[:10] == ["tools", "25.0%", "1", "(33.3%)", "1", "(50.0%)", "2", "(33.3%)", "2", "(50.0%)"]
    assert (lang[10], tools[10]) == ("33.3", "100.0")


def test_success_of_a_source_counts_groups_as_draws(run: Run) -> None:
    found = tally_of(episodes(run)).results({})
    assert found["tools"].success == Estimate(1.0, found["tools"].success.low, 1.0, 1)  # type: ignore[union-attr]
    assert found["lang"].success is not None
    assert (found["lang"].success.num_draws, found["lang"].share) == (2, None)


def test_a_report_without_sources_has_no_such_table(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, run.group(0, [1.0, 0.0]))
    run.write()
    assert "source " not in report.table(report.summarize(run.directory), run.directory)


def test_the_report_of_a_run_whose_recipe_is_gone_leaves_the_asked_share_out(run: Run) -> None:
    (run.directory / "recipe.toml").unlink()
    run.write()
    assert report.summarize(run.directory).sources["lang"].share is None


@pytest.mark.parametrize("kind", [LineConsole, TableConsole])
def test_each_step_on_the_console_says_how_far_each_source_is(run: Run, kind: type[Console]) -> None:
    out = io.StringIO()
    console = kind(out)  # type: ignore[call-arg]
    first, *others = episodes(run)
    console.recall(first)
    with console:
        for one in others:
            console.show(one)
        console.show(row(1, 0.5))
    said = " ".join(out.getvalue().split())
    assert "sources: lang 2 groups, 2 of 4 rollouts trained, solved 33.3 % (" in said
    assert "tools 1 groups, 2 of 2 rollouts trained, solved 100.0 % (" in said
