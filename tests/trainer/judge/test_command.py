"""`python -m trainer.judge report`."""

import json
from pathlib import Path

import pytest

from pipeline.journal.rows import Row
from tests.trainer.judge.journals import episode, judged_run, judgement
from trainer.judge import main
from trainer.records.journal_writer import Journal


def write(directory: Path, *rows: Row) -> None:
    with Journal(directory / "journal") as journal:
        for row in rows:
            journal.append(row)


def test_it_prints_the_judges_quality_and_fails_on_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judgements, episodes = judged_run([(-0.5, 1.0), (0.5, 0.0)] * 30, versions=3)
    write(tmp_path, *judgements, *episodes)
    assert main(["report", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "60 joined; judgements arrived after 2.0 s on average" in printed
    assert "120 of 120 turns have one" in printed
    assert "0.000 (0.000 to 0.000, 95 %); 60 rollouts have a score and a reward" in printed
    assert "WARNING               the AUC of the judge's mean score is 0.000, below 0.6" in printed
    assert main(["report", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rollouts"], found["auc"]["value"]) == (60, 0.0)


def test_a_judge_of_whom_little_is_known_is_reported_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, judgement("r0", None, votes=(None, None)), episode("r0", 1.0))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "0 of 1 turns have one; without one: 1 no valid vote" in printed
    assert "0 of 2 are valid; no turn has two to compare" in printed
    assert "not known, for want of a solved and an unsolved rollout to compare" in printed


@pytest.mark.parametrize("has_run", [False, True])
def test_a_directory_without_judgements_is_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_run: bool
) -> None:
    if has_run:
        write(tmp_path, episode("r0", 1.0))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2
    complaint = (
        "holds no judgement: set [judge] method" if has_run else "holds no journal with episodes.jsonl"
    )
    assert complaint in capsys.readouterr().err
