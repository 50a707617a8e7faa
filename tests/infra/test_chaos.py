"""Fault injection: which processes are killed, how requests are accounted for, and a real campaign in its short mode."""

import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import redis

from infra.chaos.__main__ import SHORT_KILLS, parse_arguments
from infra.chaos.accounts import PAIR, Leftovers, PartialSlo, Slo, audit, summarize, table
from infra.chaos.campaign import Campaign
from infra.chaos.faults import KINDS, LONG, OF_DOCKERD, SHORT, Fault, Kind, draw_faults
from infra.chaos.injection import NOT_YET_TRAINING, EndRequested, FaultInjector, MeasuredRecovery
from infra.chaos.system import MARK, RUN_ID
from pipeline import keys
from pipeline.deadletters import AttemptFailure, DeadLetter
from pipeline.harness import read_harness
from pipeline.message import encode
from pipeline.stream import GROUP
from tests.infra.ended_run import TRAINED, EndedRun
from trainer.demo.__main__ import write_program


@pytest.mark.parametrize("num_kills", [1, 2, 13, 200])
def test_as_many_are_killed_as_was_asked_for_and_every_kind_in_turn(num_kills: int) -> None:
    faults = draw_faults(KINDS, num_kills, seed=1, pace=LONG)
    killed = Counter(kind for fault in faults for kind in fault.victims)
    assert killed.total() == num_kills
    assert max(killed.values()) - min(killed[kind] for kind in KINDS) <= 1


def test_the_seed_decides_who_is_killed_when() -> None:
    first, again, other = (list(draw_faults(KINDS, 50, seed=seed, pace=SHORT)) for seed in (1, 1, 2))
    assert first == again != other


def test_docker_and_its_containerd_are_not_killed_together() -> None:
    faults = draw_faults(KINDS, 500, seed=0, pace=SHORT)
    pairs = [fault.victims for fault in faults if len(fault.victims) > 1]
    assert pairs
    assert not any(set(pair) == {"dockerd", "containerd"} for pair in pairs)


TRAINER = Path(__file__).parents[2] / "trainer"


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Iterator[EndedRun]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield EndedRun(client, tmp_path)


def test_requests_that_were_trained_dropped_withdrawn_or_died_are_accounted_for(run: EndedRun) -> None:
    run.live("good", *TRAINED)
    run.journal("good", "trained")
    run.train(1, "good")
    run.live("flat", *TRAINED)
    run.journal("flat", "zero_variance", member=1)
    run.live("gone", "enqueued", "withdrawn")
    run.live("dead", "enqueued", "claimed", "dead-lettered")
    failure = AttemptFailure(
        attempt=1, worker="w", boundary="sandbox", message="no", transient=True, failed_at=0
    )
    letter = DeadLetter(request_id="dead", task_id="t", failures=(failure,), died_at=0)
    run.client.hset(keys.dead(RUN_ID), "dead", encode(letter))
    accounts = audit(run.client, run.directory, seen=["good", "flat"], ended=True)
    assert (accounts.lost, accounts.trained_twice) == ([], [])
    assert accounts.fates == {"trained": 1, "zero_variance": 1, "withdrawn": 1, "dead": 1}


def test_a_request_that_no_source_accounts_for_is_lost(run: EndedRun) -> None:
    run.live("vanished", "enqueued", "claimed")
    (line,) = audit(run.client, run.directory, seen=[], ended=True).lost
    assert line.startswith("vanished: ")
    assert "claimed" in line


def test_a_request_that_was_seen_and_that_even_redis_forgot_is_lost(run: EndedRun) -> None:
    (line,) = audit(run.client, run.directory, seen=["seen"], ended=True).lost
    assert line.startswith("seen: ")


def test_a_dead_letter_without_evidence_is_a_loss(run: EndedRun) -> None:
    run.live("dead", "enqueued", "dead-lettered")
    letter = DeadLetter(request_id="dead", task_id="t", failures=(), died_at=0)
    run.client.hset(keys.dead(RUN_ID), "dead", encode(letter))
    assert len(audit(run.client, run.directory, seen=[], ended=True).lost) == 1


def test_what_is_outstanding_when_the_run_has_ended_is_lost(run: EndedRun) -> None:
    run.live("late", "enqueued")
    run.journal("late", "late")
    run.client.zadd(keys.open_requests(RUN_ID), {"late": 1})
    run.client.xadd(keys.stream(RUN_ID), {"head": b""})
    run.client.xreadgroup(GROUP, "learner", {keys.stream(RUN_ID): ">"})
    assert audit(run.client, run.directory, seen=[], ended=True).lost == [
        "late: still outstanding",
        "1 trajectories are not acknowledged",
    ]


def test_a_request_in_two_steps_is_trained_twice(run: EndedRun) -> None:
    run.live("greedy", *TRAINED)
    run.journal("greedy", "trained")
    run.train(1, "greedy")
    run.train(2, "greedy")
    assert audit(run.client, run.directory, seen=[], ended=True).trained_twice == ["greedy: in 2 steps"]


def test_a_request_that_a_checkpoint_had_settled_before_its_step_is_trained_twice(run: EndedRun) -> None:
    run.live("again", *TRAINED)
    run.journal("again", "trained")
    run.train(7, "again", at=99.0)
    (line,) = audit(run.client, run.directory, seen=[], ended=True).trained_twice
    assert line == "again: step 7 trained it after a checkpoint had settled it"


def test_two_requests_for_one_member_are_trained_twice(run: EndedRun) -> None:
    for name in ("first", "second"):
        run.live(name, *TRAINED)
        run.journal(name, "trained")
    run.train(1, "first", "second")
    (line,) = audit(run.client, run.directory, seen=[], ended=True).trained_twice
    assert line == "member 0 of group 0: 2 requests for it were trained"


def test_the_table_counts_from_what_a_process_needs_to_start(run: EndedRun) -> None:
    recoveries = [
        MeasuredRecovery(("engine",), total_s=14.0, start_s=10.0, hung=False),
        MeasuredRecovery(("engine",), total_s=9.0, start_s=10.0, hung=False),
        MeasuredRecovery(("redis", "worker"), total_s=6.0, start_s=2.0, hung=False),
    ]
    starts_s = dict.fromkeys(KINDS, 10.0)
    accounts = audit(run.client, run.directory, seen=[], ended=True)
    slo = summarize(
        recoveries, starts_s, accounts, Leftovers(), num_wanted=4, problems=[], steps=3, minutes=1.0
    )
    assert (slo.kills, slo.hangs, slo.recovery_s_p50, slo.recovery_s_max) == (4, 0, 4.0, 4.0)
    assert (slo.by_process["engine"].kills, slo.by_process["engine"].recovery_s_max) == (2, 4.0)
    assert slo.by_process["two at once"].kills == 2
    assert slo.is_kept
    assert "| engine | 2 | 2 | 10.0 s | 0.0 s | 4.0 s | 0 |" in table(slo)
    assert "| worker | 1 | 0 | 10.0 s | - | - | 0 |" in table(slo)


def test_anything_left_behind_is_a_failure(run: EndedRun) -> None:
    accounts = audit(run.client, run.directory, seen=[], ended=True)
    left = Leftovers(volumes=["v1"])
    slo = summarize([], {}, accounts, left, num_wanted=0, problems=[], steps=0, minutes=0.0)
    assert (slo.volumes_left, slo.is_kept) == (1, False)
    assert "left: volumes: v1" in table(slo)


def test_a_run_that_goes_on_may_have_outstanding_requests_and_no_lost_ones(run: EndedRun) -> None:
    for name in ("outstanding", "vanished"):
        run.live(name, "enqueued")
    run.client.zadd(keys.open_requests(RUN_ID), {"outstanding": 1})
    (run.directory / "journal/steps.jsonl").write_text('{"step": 1, "requ')  # still being written
    (line,) = audit(run.client, run.directory, seen=[], ended=False).lost
    assert line.startswith("vanished: ")


class SurvivingInjector:
    """In place of an injector: the system recovers from so many faults, then a signal asks for the end."""

    def __init__(self, directory: Path, *, num_faults: int) -> None:
        self.monitor = SimpleNamespace(seen_requests=set[str](), step=1)
        self.system = SimpleNamespace(arguments=SimpleNamespace(run_dir=directory, redis_port=1))
        self.said: list[str] = []
        self._num_left = num_faults

    def say(self, line: str) -> None:
        self.said.append(line)

    def inject(
        self, fault: Fault, rng: random.Random, starts_s: Mapping[Kind, float]
    ) -> MeasuredRecovery | None:
        if not self._num_left:
            raise EndRequested(signal.SIGTERM)
        self._num_left -= 1
        return MeasuredRecovery(fault.victims, total_s=12.0, start_s=10.0, hung=False)


@pytest.mark.parametrize(("num_faults", "ended_by"), [(30, "SIGTERM"), (1000, "None")])
def test_what_was_measured_is_kept_when_it_is_cut_off(tmp_path: Path, num_faults: int, ended_by: str) -> None:
    injector, file = SurvivingInjector(tmp_path, num_faults=num_faults), tmp_path / "progress.json"
    campaign = Campaign(cast(FaultInjector, injector), dict.fromkeys(KINDS, 10.0), 100, file)
    request = campaign.inject_faults(KINDS, seed=3, pace=LONG)
    assert str(request) == ended_by
    kept = msgspec.json.decode(file.read_bytes(), type=PartialSlo)
    assert kept.kills == campaign.num_kills >= 30
    assert (kept.kills == kept.wanted) == (request is None)
    assert (kept.recovery_s_p50, kept.audited_kills) == (2.0, 0)  # no Redis to audit
    assert injector.said[-1].startswith(f"{kept.kills}: ")


def test_the_monitor_knows_the_phases_in_which_the_trainer_does_not_train_yet() -> None:
    source = "".join(file.read_text() for file in sorted(TRAINER.rglob("*.py")))
    assert [phase for phase in NOT_YET_TRAINING if f'"{phase}' not in source] == []


def test_arguments_for_the_number_of_kills_work_together() -> None:
    given = parse_arguments(["--short", "--only", "redis,worker", "--kills", "9", "--seed", "4"])
    assert (given.kills, given.only, given.seed, given.pace) == (9, ["worker", "redis"], 4, SHORT)
    short, long = parse_arguments(["--short"]), parse_arguments([])
    assert set(KINDS) - set(long.only) == set(OF_DOCKERD)
    assert short.only == long.only
    assert (short.kills, long.kills, long.pace) == (7, 200, LONG)
    assert parse_arguments(["--short", "--only", "containerd"]).only == ["containerd"]


def test_programs_are_killed_only_where_one_plays(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse_arguments(["--harness", "mini", "--only", "program,container,worker"])
    assert (given.harness, given.only) == ("mini", ["worker", "container", "program"])
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--only", "program"])
    assert "give --harness mini" in capsys.readouterr().err


def test_the_program_has_the_shipped_image_and_the_prompts_of_the_demos_policy(tmp_path: Path) -> None:
    program, shipped = write_program(tmp_path / "program.toml"), read_harness("mini").harness
    assert (program.image, program.env) == (shipped.image, shipped.env)
    assert not program.uses_tools
    assert "You mend small Python repositories." in program.files["agent.yaml"]
    assert any(MARK.decode() in word for word in program.command)


# Quick: a system whose processes are killed loses no rollout and leaves nothing behind.
@pytest.mark.slow_but_for("5")
@pytest.mark.docker
@pytest.mark.timeout(1200)  # a minute and a half where nobody else is at work
@pytest.mark.parametrize("num_kills", [5, SHORT_KILLS])
def test_a_system_whose_processes_are_killed_loses_nothing_and_leaves_nothing(
    num_kills: int, task_image: str
) -> None:
    assert task_image
    bridge = Path("/sys/class/net/docker0/ifindex")
    before = bridge.read_text() if bridge.exists() else ""
    with tempfile.TemporaryDirectory(prefix="swerve-") as directory:
        options = ["--short", "--kills", str(num_kills), "--json", "--dir", f"{directory}/chaos"]
        command = [sys.executable, "-m", "infra.chaos", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        slo = msgspec.json.decode(done.stdout, type=Slo)
        assert (slo.kills, slo.lost, slo.trained_twice, slo.judged_twice) == (num_kills, 0, 0, 0)
        assert (slo.hangs, slo.problems) == (0, [])
        assert len(slo.by_process.keys() - {PAIR}) == num_kills, "each kind of process in its turn"
        assert slo.requests["trained"] > 0
        assert slo.judge_requests["joined"] > 0
        progress = Path(directory, "chaos/progress.json").read_bytes()
        assert msgspec.json.decode(progress, type=PartialSlo).kills == num_kills
        assert not Path(directory, "chaos/docker").exists()
    assert (bridge.read_text() if bridge.exists() else "") == before
