"""The CPU engine's attention gives the results of SGLang's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.serving import engine

PROGRAM = Path(__file__).parent / "both_attentions.py"
MOST = {"float32": 2e-6, "bfloat16": 2e-2}  # the last bit of a bfloat16 around 2 is 0.0156


@pytest.mark.slow
def test_batched_attention_gives_the_results_of_sglangs_own() -> None:
    environment = engine.engine_environment(engine.parse_arguments(["--model", "unused"]), dict(os.environ))
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 36
    for case, (backend, step, prompt) in found.items():
        most = MOST[case.split(", ")[2]]
        assert backend == "BatchedAttention"
        assert step <= most, case
        assert prompt <= most, case
