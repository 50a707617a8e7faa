"""The command agrees with the official harness on a preds.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.grade.predicting import grade, write_predictions
from tests.workers.verify.spans import FIX, MORE_CASES
from workers.tasksets.__main__ import main as import_tasks
from workers.verify.states import USELESS

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[3]
PREDICTIONS = {
    "fix": FIX,
    "useless": USELESS.decode(),
    "tests": MORE_CASES,
    "wrong": FIX.replace('"d": 24', '"d": 25'),
    "elsewhere": FIX.replace("spans.py", "absent.py"),
    "empty": "",
}


# Quick: the official harness and ours agree on a file of predictions.
def test_the_harness_and_grade_agree_on_a_preds_json(swe_bench_rows: Path, tmp_path: Path) -> None:
    """Each row once for each prediction, all in one run of either."""
    published = [json.loads(line) for line in swe_bench_rows.read_text().splitlines()]
    patches: dict[str, str | None] = {}
    rows: list[dict[str, object]] = []
    for row in published:
        for name, patch in PREDICTIONS.items():
            instance = f"{row['instance_id']}-{name}"
            rows.append(row | {"instance_id": instance})
            patches[instance] = patch
    source, tasks = tmp_path / "each.jsonl", tmp_path / "tasks.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert import_tasks(["import", "swe-bench", str(source), "--out", str(tasks)]) == 0
    preds = write_predictions(tmp_path / "preds.json", patches)
    given = {"rows": rows, "predictions": json.loads(preds.read_text())}
    official = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("harness.py"))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert official.returncode == 0, official.stderr
    resolved = json.loads(official.stdout.splitlines()[-1])
    status, graded = grade(tasks, str(preds))
    assert status == 0
    ours = {one["task"].partition(":")[2]: one["value"] == 1 for one in graded.values()}
    assert ours == resolved == {instance: instance.endswith("-fix") for instance in patches}
