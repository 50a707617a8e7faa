"""A run as one file: what it holds, that nothing in it runs but our script, and what is misuse."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.web import export
from infra.web.__main__ import main
from infra.web.app import STATIC
from infra.web.export import bundle
from tests.infra.web.example_run import HOSTILE, NO_REDIS, finished, store
from tests.pipeline import samples

PLACE = f"/api/runs/{samples.RUN}"


def exported(run_dir: Path, directory: Path, *flags: str) -> str:
    words = ["--run-dir", str(run_dir), "--redis", NO_REDIS, "--export", str(directory), *flags]
    assert main(words) == 0
    return (directory / "index.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', page)
    return json.loads(text)


def test_an_export_holds_the_pages_of_a_run_and_says_which_rollouts(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = exported(run_dir, tmp_path / "out", "--where", "reward=0&task=CALC", "--rollouts", "1")
    data = data_of(page)
    (row,) = data["rows"]
    assert row["reward"] == 0
    assert (data["run"], data["num_rollouts"]) == (samples.RUN, 3)
    assert data["replies"][f"{PLACE}/series"]["steps"][0]["loss"] == 0.25
    assert data["replies"][f"{PLACE}/rollouts/{row['request_id']}"]["turns"][0]["text"] == HOSTILE
    assert f"{PLACE}/rollouts/solved" not in data["replies"]
    told = capsys.readouterr().out
    assert "the newest 1 rollouts of 2 that match reward=0&amp;task=CALC, of 3 in all" in page
    assert "the newest 1 rollouts of 2 that match reward=0&task=CALC, of 3 in all" in told


def test_only_our_script_and_style_may_run_and_hostile_text_ends_neither(
    run_dir: Path, tmp_path: Path
) -> None:
    page = exported(run_dir, tmp_path / "out")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for kind, text in re.findall(r"<(script|style)>(.*?)</\1>", page, flags=re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert page.count("<script") == page.count("</script") == 2
    assert "onerror" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_every_module_of_the_pages_is_in_the_script(tmp_path: Path) -> None:
    script = bundle(STATIC / "app.js", {})
    assert script.count("return {") >= len(list(STATIC.rglob("*.js")))
    assert re.findall(r"^(?:import|export)\b.*", script, flags=re.MULTILINE) == []


@pytest.mark.parametrize("text", ["export default 1;\n", "import './b.js';\n", 'import d from "./b.js";\n'])
def test_a_module_of_a_form_that_is_not_known_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.js").write_text(text)
    with pytest.raises(AssertionError, match="cannot be bundled"):
        bundle(tmp_path / "a.js", {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--run", "nosuch"], "give its id with --run"),
        (["--where", "rewrad=1"], "--where: rewrad: no such parameter"),
        (["--where", "reward=much"], "--where: reward: "),
        (["--where", "sort=reward"], "--where 'sort=reward'"),
        (["--where", "nothing"], "--where 'nothing'"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    words = ["--run-dir", str(run_dir), "--redis", NO_REDIS, "--export", str(tmp_path / "out"), *flags]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_has_no_more_bytes_than_its_bound(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(run_dir, *(finished(f"more{number}", reward=0.0) for number in range(20)))
    whole = data_of(exported(run_dir, tmp_path / "whole"))
    assert len(whole["rows"]) == 23
    monkeypatch.setattr(export, "MAX_BYTES", 20_000)
    page = exported(run_dir, tmp_path / "bounded")
    num_held = len(data_of(page)["rows"])
    assert 0 < num_held < 23
    assert f"the newest {num_held} rollouts of 23 in all" in page
