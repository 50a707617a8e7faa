"""What Prometheus, Grafana and Tempo are configured with is valid, up to date, and found where compose puts it."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from infra.observe import dashboards
from tests.infra.observe.queries import OBSERVE, expressions
from tests.infra.test_compose import services

RULES_TEST = Path("tests/infra/observe/rules_test.yaml")
PROFILES = "cpu,judge,judge-model,trainer,observe"


def promtool(*words: str | Path) -> None:
    """Prometheus' own checks."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_those_of_the_panels(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards.main(["--check"]) == 0, capsys.readouterr().err


def test_a_dashboard_that_is_not_up_to_date_is_named_and_then_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert dashboards.main(["--check"]) == 1
    assert f"{tmp_path}/swerve-fleet.json is not up to date" in capsys.readouterr().err
    assert (dashboards.main([]), dashboards.main(["--check"])) == (0, 0)


def test_each_query_stands_once_in_its_panel_and_panels_do_not_overlap() -> None:
    for path in (OBSERVE / "grafana/dashboards").glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        for panel in panels:
            queries = [target["expr"] for target in panel["targets"]]
            assert len(set(queries)) == len(queries) > 0, panel["title"]


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus_local.yaml"])
def test_prometheus_accepts_its_configuration(name: str) -> None:
    promtool("check", "config", OBSERVE / name)


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    alerts = {place.removeprefix("alert ") for place, _, _ in expressions() if place.startswith("alert ")}
    cases = yaml.safe_load(RULES_TEST.read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts
    promtool("test", "rules", RULES_TEST)


def test_prometheus_reads_the_services_of_compose_at_the_ports_that_they_serve() -> None:
    found = services(PROFILES)
    jobs = yaml.safe_load((OBSERVE / "prometheus.yaml").read_text())["scrape_configs"]
    wanted = {job["job_name"]: job["dns_sd_configs"] for job in jobs}
    assert {name for (sd,) in wanted.values() for name in sd["names"]} <= found.keys()
    for job, service in (("workers", "workers"), ("judges", "judges"), ("trainer", "trainer")):
        environment = found[service]["environment"]
        assert environment["SWERVE_METRICS_PORT"] == str(wanted[job][0]["port"])
        assert environment["SWERVE_METRICS_HOST"] == "0.0.0.0"
    assert str(wanted["engines"][0]["port"]) in found["engine"]["command"]


def test_engines_have_the_same_names_whichever_version_of_prometheus_reads_them() -> None:
    files = [
        yaml.safe_load((OBSERVE / name).read_text()) for name in ("prometheus.yaml", "prometheus_local.yaml")
    ]
    rules = [
        job["metric_relabel_configs"]
        for file in files
        for job in file["scrape_configs"]
        if job["job_name"] == "engines"
    ]
    assert rules[0] == rules[1]
    assert rules[0][0]["regex"] == "sglang:(.+)"
    assert not any("sglang:" in expression for _, expression, _ in expressions())


def test_compose_mounts_what_the_configurations_name_and_publishes_on_this_machine_only() -> None:
    found = services(PROFILES)
    mounted = {
        name: {volume["target"]: Path(volume["source"]) for volume in found[name].get("volumes", ())}
        for name in ("prometheus", "grafana", "tempo")
    }
    assert all(
        source.exists() for mounts in mounted.values() for source in mounts.values() if source.is_absolute()
    )
    provisioning = OBSERVE / "grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/swerve.yaml").read_text())["providers"]
    assert provider["options"]["path"] in mounted["grafana"]
    sources = yaml.safe_load((provisioning / "datasources/swerve.yaml").read_text())["datasources"]
    assert dashboards.SOURCE in [{"type": one["type"], "uid": one["uid"]} for one in sources]
    published = [port for service in found.values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    tempo = yaml.safe_load((OBSERVE / "tempo.yaml").read_text())
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == "0.0.0.0:4318"
