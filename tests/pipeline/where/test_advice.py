"""What the trainer waited for, and the advice that comes of it."""

from functools import reduce
from pathlib import Path

import msgspec
import pytest

from pipeline.journal.rows import ClosedBy, FleetRow
from pipeline.where.accounts import BUSY, IDLE, NO_WORKER, PAUSED, account, waiting_of
from pipeline.where.findings import RULES, Known, advice_of
from tests.pipeline.where.made import fleet
from trainer.recipe import Recipe, load_recipe


def known(
    *samples: FleetRow,
    work: dict[str, float] | None = None,
    evaluation_share: float = 0.0,
    dropped_share: float = 0.0,
    wait: float = 0.0,
    trainer: dict[str, float] | None = None,
) -> Known:
    """Of a trainer that waited so long for groups, and spent the rest of its time so."""
    return Known(
        trainer=account("trainer", {"waiting for groups": wait, **(trainer or {})}),
        slots=account("slots", work or {}),
        waiting=waiting_of(wait, samples),
        evaluation_share=evaluation_share,
        dropped_share=dropped_share,
    )


def best(found: Known) -> tuple[str, float]:
    first = next(advice_of(found))
    return first.setting, round(first.gain, 6)


def test_the_time_that_the_trainer_waited_is_divided_by_what_slots_did_meanwhile() -> None:
    found = waiting_of(
        60.0,
        [
            fleet(span_s=5.0, slots=4, running=4),
            fleet(span_s=5.0, slots=4, running=1, paused=1, closed_by="lag"),
            fleet(span_s=10.0, slots=0, running=0),
            fleet(span_s=99.0, running=0, closed_by="redis", is_waiting=False),
        ],
    )
    assert found is not None
    assert found.parts_s == {BUSY: 15.0 + 3.75, NO_WORKER: 30.0, PAUSED: 3.75, IDLE["lag"]: 7.5}
    assert found.cpu_share is None
    assert waiting_of(60.0, [fleet(is_waiting=False)]) is None


def test_processors_count_as_busy_from_nine_tenths_on() -> None:
    samples = [fleet(span_s=5.0, cpu_share=1.0), fleet(span_s=5.0, cpu_share=0.7), fleet(span_s=90.0)]
    found = waiting_of(60.0, samples)
    assert found is not None
    assert found.cpu_share == pytest.approx(0.85)
    assert not found.are_processors_busy
    busy = waiting_of(60.0, [fleet(cpu_share=0.9)])
    assert busy is not None
    assert busy.are_processors_busy


IDLE_CASES: list[tuple[ClosedBy, str]] = [
    ("lag", "admission.max_lag_versions"),
    ("weights", "weights.transport"),
    ("evaluation", "evaluation.episodes"),
    ("judge", "judge.required"),
    ("redis", "admission.max_queue_bytes"),
    ("memory", "admission.max_held_bytes"),
    ("failures", "swerve dead"),
]


@pytest.mark.parametrize(("bound", "setting"), IDLE_CASES)
def test_slots_that_are_idle_while_the_trainer_waits_lead_to_what_closes_admission(
    bound: ClosedBy, setting: str
) -> None:
    found = known(fleet(slots=4, running=1, closed_by=bound), wait=80.0, trainer={"forward": 20.0})
    assert best(found) == (setting, 0.6)


def test_the_largest_part_of_the_claims_that_the_trainer_waits_for_has_advice_of_its_own() -> None:
    work = {"grade": 6.0, "command": 2.0, "container open": 1.5, "container close": 0.5}
    found = advice_of(known(fleet(), work=work, wait=80.0, trainer={"other": 20.0}))
    gains = {one.text.rpartition("for ")[2]: round(one.gain, 6) for one in found}
    assert gains["claims that are graded."] == 0.48
    assert gains["claims that run the agent's commands."] == 0.16
    assert gains["containers that start and end."] == 0.16


def test_full_slots_lead_to_more_slots_or_where_claims_wait_for_engines_to_more_of_them() -> None:
    patient = {"waiting for the engine": 1.0, "generate": 2.0, "command": 7.0}
    assert best(known(fleet(), work=patient, wait=80.0, trainer={"other": 20.0})) == ("--slots", 0.72)
    queued = {"waiting for the engine": 6.0, "generate": 2.0, "command": 2.0}
    assert best(known(fleet(), work=queued, wait=80.0, trainer={"other": 20.0})) == ("swerve engine", 0.64)


def test_more_slots_are_no_advice_on_a_machine_whose_processors_are_busy() -> None:
    found = known(fleet(cpu_share=0.99), work={"command": 1.0}, wait=80.0, trainer={"other": 20.0})
    assert {one.setting: one.gain for one in advice_of(found)} == {
        "SWERVE_DOCKER_HOSTS": 0.8,
        "rollout.limits.command_s": 0.8,
    }


def test_missing_or_paused_workers_are_named() -> None:
    assert best(known(fleet(slots=0, running=0), wait=50.0, trainer={"other": 50.0})) == ("swerve work", 0.5)
    assert best(known(fleet(slots=4, running=0, paused=4), wait=50.0, trainer={"other": 50.0})) == (
        "swerve status",
        0.5,
    )


def test_episodes_that_train_nothing_are_weighed_by_the_slots_that_they_take() -> None:
    busy = fleet(cpu_share=1.0)
    evaluated = known(busy, wait=50.0, trainer={"evaluation": 30.0, "other": 20.0}, evaluation_share=0.5)
    assert best(evaluated) == ("evaluation.episodes", 0.55)
    dropped = known(busy, wait=50.0, trainer={"other": 50.0}, dropped_share=0.4)
    assert ("curriculum.kind", 0.2) in [(one.setting, one.gain) for one in advice_of(dropped)]


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        ("backward", "--nproc-per-node"),
        ("checkpoint", "checkpoint.every_steps"),
        ("audit", "audit.share"),
        ("export", "--run-dir"),
        ("evaluation", "evaluation.episodes"),
        ("start", "num_steps"),
    ],
)
def test_what_the_loop_itself_does_leads_to_its_setting(part: str, setting: str) -> None:
    assert best(known(wait=60.0, trainer={"other": 10.0, part: 30.0})) == (setting, 0.3)


def test_every_piece_of_advice_was_given_above_and_what_gains_less_than_a_hundredth_is_not_said() -> None:
    given = {
        *(setting for _, setting in IDLE_CASES),
        *("--slots", "swerve engine", "SWERVE_DOCKER_HOSTS", "swerve work", "swerve status", "curriculum.kind"),
        *("tasks.train", "rollout.limits.command_s"),
        *("--nproc-per-node", "checkpoint.every_steps", "audit.share", "--run-dir", "num_steps"),
    }
    assert {setting for setting, _, _ in RULES} == given
    assert list(advice_of(known(wait=99.5, trainer={"audit": 0.5}))) == []
    assert list(advice_of(known())) == []


def test_each_key_that_advice_names_is_one_of_the_recipe() -> None:
    recipe: Recipe = load_recipe(Path("trainer/recipes/demo.toml"))
    named = [setting for setting, _, _ in RULES if "." in setting]
    assert len(named) == 11
    for setting in named:
        *tables, key = setting.split(".")
        table = reduce(getattr, tables, recipe)
        assert key in {field.name for field in msgspec.structs.fields(type(table))}, setting
