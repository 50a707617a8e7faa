"""The conformance check passes on our engine behind our router, and names what is broken of engines broken on purpose."""

import subprocess
import sys

import pytest

from infra.serving.check.__main__ import CHECKS, REFERENCE, certify
from tests.conftest import Serving
from tests.infra.serving.broken_engine import FAULTS, broken_engine

# By fault, the check that must name it; others may notice it too.
CAUGHT_BY = {
    "feeds another token": "token_ids",
    "ignores the temperature": REFERENCE,
    "trims the stop token": "stop_tokens",
    "names the newest weights only": "weight_versions",
    "rounds log-probs": "prefill_logprobs",
    "ignores pauses": "pause_modes",
    "ignores aborts": "abort",
    "goes on after a client hung up": "cancelled_requests",
    "gives a request another's reply": "burst",
}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.serving.check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
async def test_our_engine_behind_our_router_is_certified(serving: Serving) -> None:
    await serving.name_weights("certified")  # of `model_dir`: other tests may have published theirs
    done = check("--router", serving.router_url, "--model", str(serving.model_dir))
    results = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(results) == {*CHECKS, REFERENCE}
    assert {name for name, line in results.items() if " ok " not in line} == {"affinity"}
    assert "not checked  the router has one engine" in results["affinity"]
    assert "1000 requests" in results["burst"]


@pytest.mark.slow
async def test_an_engine_without_a_router_is_certified_and_told_what_was_not_checked(
    serving: Serving,
) -> None:
    findings = await certify(
        "", [serving.engine_url], None, num_burst_requests=20, only=["burst", "affinity"]
    )
    assert [(one.check, one.result) for one in findings] == [("affinity", "not checked"), ("burst", "ok")]


@pytest.mark.slow_but_for("feeds-another-token", "ignores-the-temperature")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "-"))
async def test_an_engine_that_is_broken_is_named_with_what_it_did(serving: Serving, fault: str) -> None:
    async with broken_engine(serving.engine_url, fault) as url:
        found = await certify("", [url], serving.model_dir, num_burst_requests=60, only=[CAUGHT_BY[fault]])
    (finding,) = found
    assert finding.result == "FAILED", finding
    assert url in finding.detail


def test_mistakes_are_one_line(serving: Serving) -> None:
    for arguments, complaint in (
        ([], "give --router, or --engine, or both"),
        (["--engine", serving.engine_url, "--model", "/nowhere"], "no config.json"),
        (["--engine", serving.engine_url, "--only", REFERENCE], "needs --model"),
    ):
        done = check(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert complaint in done.stderr.splitlines()[-1]
