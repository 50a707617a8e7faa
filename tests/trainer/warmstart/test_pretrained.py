"""Imitation by a pretrained model: its lessons are rows of fine-tuning, its loss falls, and a kill costs little."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pipeline.journal.reading import read
from pipeline.journal.rows import HeldoutLossRow, ImitationStepRow
from pipeline.tokenizer import read_bundle
from tests.trainer.forking import fork
from trainer.demo.family import make_task
from trainer.demo.lessons import Templates, teach
from trainer.learner.families.registry import read_architecture
from trainer.warmstart import pretrained
from trainer.warmstart.pretrained import FIRST_PROBE, Warmstart, imitate, lesson


def begun(model: Path, out: Path, *words: str, module: str = "trainer.warmstart", **variables: str) -> int:
    process = fork(
        module,
        f"--model={model}",
        f"--out={out}",
        *words,
        log=out.with_suffix(".log"),
        SWERVE_REDIS_URL="redis://127.0.0.1:1",
        **variables,
    )
    return process.wait()


def test_a_lesson_is_the_teachers_episode_as_a_row() -> None:
    taught = teach(make_task(3, "warmstart", 5), random.Random("3/5"), Templates())
    assert lesson(3, 5, Templates()) == {
        "messages": [{"role": one.role, "content": one.content} for one in taught.messages]
    }


@pytest.mark.slow
def test_imitation_lowers_the_loss_on_lessons_that_it_has_not_seen(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "policy"
    assert begun(tiny_model, out, "--lessons=48") == 0, out.with_suffix(".log").read_text()
    said = out.with_suffix(".log").read_text()
    assert f"the policy that imitates the teacher is in {out}" in said
    losses = dict(re.findall(r"held out, (before|after): ([0-9.]+)", said))
    assert float(losses["after"]) < float(losses["before"]) - 0.05
    assert not out.with_name("policy.partial").exists(), "nothing but the policy is left"
    assert read_bundle(out) == read_bundle(tiny_model)
    own = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert Tokenizer.from_file(str(out / "tokenizer.json")).to_str() == own.to_str()
    assert read_architecture(out) == read_architecture(tiny_model)
    monkeypatch.setattr(pretrained.run, "main", pytest.fail)
    assert imitate(tiny_model, out, Warmstart(num_lessons=48)) == 0, "what is complete is kept"


@pytest.mark.slow
def test_an_imitation_that_is_stopped_is_not_complete_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    words, log = (f"--model={tiny_model}", f"--out={out}", "--lessons=2000"), out.with_suffix(".log")
    process = fork("trainer.warmstart", *words, log=log)
    journal = out.with_name("policy.partial") / "run/journal"
    while not any(read(journal, ImitationStepRow)):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 1
    assert f"{out} is not complete; the same command goes on" in log.read_text()
    assert not out.exists()


@pytest.mark.slow
def test_a_killed_imitation_goes_on_from_its_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    out, mortal = tmp_path / "policy", "tests.trainer.warmstart.mortal"
    assert begun(tiny_model, out, "--lessons=144", module=mortal, DIES_AFTER_STEP="17") == -signal.SIGKILL
    assert not out.exists()
    journal = out.with_name("policy.partial") / "run/journal"
    assert [row.name for row in read(journal, HeldoutLossRow)] == ["before", "step_16"]
    assert begun(tiny_model, out, "--lessons=144") == 0, out.with_suffix(".log").read_text()
    assert (out / "config.json").exists()


def test_a_command_with_other_settings_does_not_go_on_from_a_state(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(pretrained.run, "main", lambda words: given.append(words) or 1)
    assert imitate(tiny_model, tmp_path / "out", Warmstart(num_lessons=2, num_probes=1)) == 1
    with pytest.raises(ValueError, match="is of a command with other settings: repeat that, or remove it"):
        imitate(tiny_model, tmp_path / "out", Warmstart(num_lessons=3, num_probes=1))
    (tmp_path / "out.partial/run").mkdir()
    assert imitate(tiny_model, tmp_path / "out", Warmstart(num_lessons=2, num_probes=1)) == 1
    assert [words[-1] for words in given] == ["warmstart", "--resume"]
    rows = [json.loads(line) for line in (tmp_path / "out.partial/heldout.jsonl").read_text().splitlines()]
    assert rows == [lesson(0, FIRST_PROBE, Templates())]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model=/no/model"], "holds no config.json: give a Hugging Face directory"),
        (["--model=.", "--lessons=0"], "--lessons is 0; it must be 1 or more"),
    ],
)
def test_a_users_mistake_is_one_line(options: list[str], complaint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.warmstart", f"--out={tmp_path / 'out'}", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr
