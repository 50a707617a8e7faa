"""Every command that README.md and docs/ show is understood by the program that it names, and is run by a test or listed in
docs/status.md as one that no test can run.
"""

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.commands import OURS, PAGES, ROOT, SHELL, Command, commands, inline_commands

# Which test runs what; the glob is matched with the command as tests/docs/commands.py spells it.
RUN_BY = {
    "python -m pipeline *": "tests/pipeline/cli/test_verbs.py",
    "python -m pipeline.templates *": "tests/pipeline/test_templates.py",
    "python -m trainer.run *": "tests/trainer/test_run.py",
    "python -m trainer.convert *": "tests/trainer/test_convert.py",
    "python -m trainer.plan *": "tests/trainer/plan/test_plan.py",
    "python -m trainer.compare.power *": "tests/trainer/compare/test_compare.py",
    "python -m trainer.compare *": "tests/trainer/compare/test_compare.py",
    "python -m trainer.evaluate compare *": "tests/trainer/evaluate/test_figures.py",
    "python -m trainer.evaluate tasks.jsonl *": "tests/trainer/evaluate/test_local.py",
    "python -m trainer.evaluate *": "tests/trainer/evaluate/test_weights.py",
    "python -m trainer.rollouts export *": "tests/trainer/rollouts/test_export.py",
    "python -m trainer.report *": "tests/trainer/test_report.py",
    "python -m pipeline.where *": "tests/pipeline/where/test_command.py",
    "python -m trainer.judge report *": "tests/trainer/judge/test_command.py",
    "python -m trainer.replay *": "tests/trainer/replay/test_replay.py",
    "python -m trainer.curve *": "tests/trainer/test_report.py",
    "python -m workers.tasksets import harbor *": "tests/workers/tasksets/test_harbor_graded.py",
    "python -m workers.tasksets export harbor *": "tests/workers/tasksets/test_harbor_graded.py",
    "python -m workers.tasksets import *": "tests/workers/tasksets/test_importing.py",
    "python -m workers.tasksets from-git *": "tests/workers/making/test_from_git.py",
    "python -m workers.tasksets plant *": "tests/workers/making/test_plant.py",
    "python -m workers.tasksets split *": "tests/workers/tasksets/test_importing.py",
    "python -m workers.tasksets join *": "tests/workers/tasksets/test_dataset.py",
    "python -m workers.tasksets report *": "tests/workers/tasksets/test_dataset.py",
    "python -m workers.tasksets export *": "tests/workers/tasksets/test_exports.py",
    "python -m workers.run": "tests/journeys/test_a_worker_dies.py",
    "python -m workers.judge": "tests/workers/judge/test_process.py",
    "python -m workers.verify *": "tests/workers/verify/conftest.py",
    "python -m workers.play *--harness *": "tests/workers/play/test_harness.py",
    "python -m workers.play *": "tests/workers/play/test_play.py",
    "python -m workers.grade *": "tests/workers/grade/test_command.py",
    "python -m workers.agent *": "tests/workers/agent/test_command.py",
    "python -m tests.workers.agent.fidelity": "tests/workers/agent/test_fidelity.py",
    "python -m workers.leaks *": "tests/workers/leaks/test_find.py",
    "python -m workers.reap*": "tests/workers/test_reap.py",
    "python -m workers.harness *": "tests/workers/harness/test_command.py",
    "python -m workers.images *": "tests/workers/images/conftest.py",
    "python -m infra.serving.engine *": "tests/conftest.py",
    "python -m infra.serving.router *": "tests/conftest.py",
    "python -m infra.serving.check *": "tests/infra/serving/test_check.py",
    "python -m infra.serving.receiver *": "tests/trainer/weights/receivers.py",
    "python -m infra.web *--export *": "tests/infra/web/test_export.py",
    "python -m infra.web *": "tests/infra/web/test_process.py",
    "python -m infra.images.build *": "tests/infra/test_images.py",
    "python -m infra.services *": "tests/infra/test_services.py",
    "python -m infra.local *": "tests/infra/test_local.py",
    "python -m infra.observe.dashboards": "tests/infra/observe/test_files.py",
    "python -m infra.chaos*": "tests/infra/test_chaos.py",
    "python -m benchmarks.gpu_check *": "tests/benchmarks/test_gpu_check.py",
    "python -m benchmarks.harnesses*": "tests/workers/foreign/test_shipped.py",
    "python -m benchmarks.compare": "tests/benchmarks/test_benchmarks.py",
    "python -m benchmarks.tracing": "tests/benchmarks/test_benchmarks.py",
    "python -m benchmarks.staleness*": "tests/benchmarks/test_simulation.py",
    "python -m benchmarks.credit*": "tests/benchmarks/test_credit.py",
    "python -m benchmarks.curriculum*": "tests/benchmarks/test_simulation.py",
    "swerve --help": "tests/test_swerve.py",
    "bash infra/cluster/make_certificates.sh *": "tests/infra/test_tls.py",
    "bash infra/cluster/node_setup.sh *": "tests/infra/cluster/test_node_setup.py",
}
# Words of the pages that stand for a value, where the parser wants one of a kind.
PLACEHOLDERS = {"AGE": "90s", "KIND": "instances-jsonl", "N": "2", "S": "1", "SOURCE": "fleet"}


def read(page: str) -> str:
    return (ROOT / page).read_text()


LIST = "\n## Commands that no test runs\n"
SHOWN = [command for page in PAGES for command in commands(page, read(page))]
NAMED = [command for page in PAGES for command in inline_commands(page, read(page).partition(LIST)[0])]


def listed() -> dict[str, str]:
    """Command and reason of each row of the one list of what no test runs."""
    _, _, section = read("docs/status.md").partition(LIST)
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section.partition("\n## ")[0], flags=re.MULTILINE))


def is_ours(command: Command) -> bool:
    return command.text.startswith("python -m ") and OURS.match(command.text) is not None


def test_the_pages_show_commands() -> None:
    assert {"README.md", "docs/demo.md"} <= {command.page for command in SHOWN}
    assert any(map(is_ours, SHOWN))


# Quick: no page shows a command or a flag that its program does not know.
def test_programs_of_ours_understand_every_command_that_is_shown_and_every_flag_that_is_named() -> None:
    given = [(command, False) for command in SHOWN if is_ours(command)]
    given += [(command, True) for command in NAMED if is_ours(command)]
    request = [{"words": words_after_m(command), "partial": partial} for command, partial in given]
    done = subprocess.run(
        [sys.executable, "tests/docs/parse.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong = [
        f"{command}\n{said}"
        for (command, _), said in zip(given, json.loads(done.stdout), strict=True)
        if said
    ]
    assert not wrong, "\n".join(wrong)


def words_after_m(command: Command) -> list[str]:
    words = [word.strip("[]").partition("|")[0] for word in command.words[2:]]
    return [PLACEHOLDERS.get(word, word) for word in words]


@pytest.mark.parametrize(
    "words",
    [["workers.verify", "t.jsonl", "--nosuch"], ["workers.tasksets", "import", "nosuch", "p", "--out", "o"]],
)
def test_a_flag_or_a_value_that_does_not_exist_would_be_noticed(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "tests/docs/parse.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        input=json.dumps([{"words": words, "partial": False}]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nosuch" in json.loads(done.stdout)[0]


def test_make_knows_every_target_and_variable() -> None:
    makefile = read("Makefile")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) *[?:]?=", makefile, flags=re.MULTILINE)) | set(
        re.findall(r"\$\(if \$\(([A-Z]+)\)", makefile)
    )
    for command in chain(SHOWN, NAMED):
        first, *words = (word.strip("[]") for word in command.words)
        if first == "make":
            assert {word for word in words if "=" not in word} <= targets, command
            assert {word.partition("=")[0] for word in words if "=" in word} <= variables, command


def test_scripts_know_their_flags() -> None:
    for command in SHOWN:
        script = ROOT / command.words[0]
        if script.is_file():
            flags = {word.partition("=")[0] for word in command.words[1:] if word.startswith("--")}
            assert {flag for flag in flags if flag not in script.read_text()} == set(), command


def test_files_and_services_that_commands_name_exist() -> None:
    services = set(re.findall(r"^  ([a-z-]+):$", read("docker-compose.yml"), flags=re.MULTILINE))
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for command in SHOWN:
        for word in command.words:
            if word.startswith(("infra/", "docs/", "examples/", "trainer/recipes/")):
                assert (ROOT / word).exists(), command
        if command.text.startswith("docker compose up "):
            assert {word for word in command.words[3:] if word.isalpha()} <= services, command
        for extra in re.findall(r"\.\[([a-z,]+)\]", command.text):
            assert set(extra.split(",")) <= extras.keys(), command


@pytest.mark.parametrize("command", SHOWN, ids=str)
def test_every_command_is_run_by_a_test_or_is_in_the_list(command: Command) -> None:
    patterns = [*RUN_BY, *listed()]
    assert command.words[0] in SHELL or any(fnmatchcase(command.text, pattern) for pattern in patterns), (
        f"{command}: no test runs it. Write one and name it in RUN_BY, or list it in docs/status.md with the reason"
    )


def test_the_list_holds_nothing_that_no_page_shows() -> None:
    assert listed()
    for pattern in listed():
        assert any(fnmatchcase(command.text, pattern) for command in SHOWN), pattern


@pytest.mark.parametrize("pattern", RUN_BY)
def test_the_test_that_runs_a_command_speaks_of_it(pattern: str) -> None:
    text = Path(ROOT, RUN_BY[pattern]).read_text()
    program = pattern.removeprefix("python -m ").split()[0].rstrip("*")
    names = [Path(program).name] if "/" in program else program.split(".")
    assert [name for name in names if name not in text] == []
