"""The dashboards as data, written as the files that Grafana reads: `python -m infra.observe.dashboards [--check]`.

With `--check` nothing is written, and exit status 1 reports files that differ from what would be written.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.commandline import program

Unit = Literal["none", "s", "bytes", "percentunit", "ops", "short"]


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str  # Grafana puts a label's value into {{label}}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    stacked: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A Grafana dashboard. `run_metric` is the metric whose label `swerve_run` has the choices for the variable $run; empty: there is no
    variable."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    run_metric: str = ""


def newest(title: str, *names: str, unit: Unit = "none", description: str = "") -> Panel:
    """A panel with the newest numbers of a run's steps, as the sinks record them."""
    queries = tuple(Query(f'{name}{{swerve_run=~"$run"}}', f"{{{{swerve_run}}}} {name}") for name in names)
    return Panel(title, queries, unit, description=description)


def rate(title: str, counter: str, label: str, *, unit: Unit = "ops", description: str = "") -> Panel:
    """A panel with the rate at which a counter of a run grows, by a label."""
    chosen = f'sum by ({label}) (rate({counter}{{swerve_run=~"$run"}}[$__rate_interval]))'
    return Panel(title, (Query(chosen, f"{{{{{label}}}}}"),), unit, stacked=True, description=description)


def quantiles(title: str, histogram: str, by: str = "", where: str = "", *, description: str = "") -> Panel:
    """A panel with the median and 90th percentile of a histogram of seconds."""
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return Panel(
        title,
        tuple(
            Query(
                f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{where}[$__rate_interval])))",
                f"{legend}p{share * 100:.0f}",
            )
            for share in (0.5, 0.9)
        ),
        "s",
        description=description,
    )


RUN = '{swerve_run=~"$run"}'

TRAINING = Dashboard(
    "swerve-training",
    "Swerve: training",
    (
        newest(
            "Reward of training rollouts",
            "swerve_train_reward_mean",
            description="Mean since the step before",
        ),
        Panel(
            "Held-out success",
            (
                Query(
                    f"swerve_heldout_success{RUN}",
                    "{{swerve_run}} {{swerve_heldout_set}} {{swerve_sampling}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Where the training loop's time goes",
            (
                Query(
                    f"sum by (swerve_part) (rate(swerve_step_time_seconds_total{RUN}[$__rate_interval]))",
                    "{{swerve_part}}",
                ),
            ),
            "percentunit",
            stacked=True,
            description="Share of the wall time. Mostly `wait`: rollouts are the bottleneck.",
        ),
        newest("Loss", "swerve_train_loss"),
        newest("Gradient norm", "swerve_train_grad_norm"),
        newest("Entropy", "swerve_train_entropy", description="Nats per trained token"),
        newest(
            "Log-prob gap",
            "swerve_train_logprob_gap_mean",
            "swerve_train_logprob_gap_max",
            description="Engine against learner under the same weights, in nats",
        ),
        newest("Lag", "swerve_train_lag_mean", "swerve_train_lag_max", description="In weight versions"),
        newest(
            "What the objective leaves of stale tokens",
            "swerve_train_signal_ess_share",
            "swerve_train_signal_masked_share",
            "swerve_train_signal_vetoed_share",
            "swerve_train_ess_share",
            "swerve_train_masked_share",
            "swerve_train_vetoed_share",
            unit="percentunit",
            description="`signal`: each token counts by its advantage times how uncertain the policy is of it",
        ),
        rate("Rollouts a second, by what became of them", "swerve_rollouts_settled_total", "swerve_fate"),
        rate("Rollouts a second, by how they ended", "swerve_rollouts_settled_total", "swerve_outcome"),
        Panel(
            "Tokens a second",
            (
                Query(f"sum(rate(swerve_tokens_sampled_total{RUN}[$__rate_interval]))", "sampled"),
                Query(f"sum(rate(swerve_tokens_trained_total{RUN}[$__rate_interval]))", "trained"),
            ),
            "ops",
        ),
        Panel(
            "Groups and requests",
            (
                Query(f"swerve_groups{RUN}", "groups {{swerve_state}}"),
                Query(f"swerve_requests_outstanding{RUN}", "requests outstanding"),
                Query(f"swerve_admission_room{RUN}", "groups that may be enqueued"),
            ),
        ),
        quantiles("Time in the queue", "swerve_rollout_queue_duration_seconds", "swerve_purpose", RUN),
        quantiles(
            "Time of a rollout from its claim", "swerve_rollout_claim_duration_seconds", "swerve_purpose", RUN
        ),
        Panel(
            "Weight versions",
            (
                Query(f"swerve_weights_version{RUN}", "{{swerve_state}}"),
                Query(f"swerve_engines{RUN}", "engines {{swerve_state}}"),
            ),
        ),
        quantiles(
            "From a version's announcement until all engines serve it",
            "swerve_weights_delivery_duration_seconds",
            where=RUN,
        ),
        Panel(
            "Trajectories that wait",
            (Query(f"swerve_trajectories_size_bytes{RUN}", "{{swerve_place}}"),),
            "bytes",
            stacked=True,
        ),
        rate("Judge requests a second", "swerve_judgements_settled_total", "swerve_fate"),
        Panel("Alarms", (Query(f"swerve_alarm_active{RUN} == 1", "{{swerve_run}} {{swerve_alarm}}"),)),
    ),
    run_metric="swerve_run_step",
)

FLEET = Dashboard(
    "swerve-fleet",
    "Swerve: fleet",
    (
        Panel(
            "Slots of workers and claims by phase",
            (
                Query(
                    'sum by (swerve_phase) (swerve_worker_claims_active{service_name="worker"})',
                    "{{swerve_phase}}",
                ),
                Query('sum(swerve_worker_slots{service_name="worker"})', "slots"),
            ),
        ),
        Panel(
            "Slots of judges and claims by phase",
            (
                Query(
                    'sum by (swerve_phase) (swerve_worker_claims_active{service_name="judge"})',
                    "{{swerve_phase}}",
                ),
                Query('sum(swerve_worker_slots{service_name="judge"})', "slots"),
            ),
        ),
        Panel(
            "Processes that claim nothing, or do without something",
            (
                Query("sum by (service_name) (swerve_worker_paused)", "{{service_name}} paused"),
                Query("sum by (service_name) (swerve_worker_reduced)", "{{service_name}} reduced"),
            ),
        ),
        Panel(
            "Claims a second, by their end",
            (
                Query(
                    "sum by (service_name, swerve_result) (rate(swerve_worker_claims_ended_total[$__rate_interval]))",
                    "{{service_name}} {{swerve_result}}",
                ),
            ),
            "ops",
            stacked=True,
        ),
        quantiles("Time of a reply, waits included", "gen_ai_client_operation_duration_seconds"),
        quantiles("Time until an engine works on a reply", "swerve_reply_wait_duration_seconds"),
        quantiles(
            "How long spans last",
            "swerve_span_duration_seconds",
            "swerve_span",
            description="docs/traces.md says what each span is",
        ),
        Panel(
            "Seconds in spans per second",
            (
                Query(
                    "sum by (swerve_span) (rate(swerve_span_duration_seconds_sum[$__rate_interval]))",
                    "{{swerve_span}}",
                ),
            ),
            description="How many are under way on average. A span that holds others counts with them.",
        ),
        Panel(
            "Memory",
            (Query("sum by (service_name) (process_memory_usage_bytes)", "{{service_name}}"),),
            "bytes",
            stacked=True,
        ),
        Panel(
            "Cores in use",
            (
                Query(
                    "sum by (service_name) (rate(process_cpu_time_seconds_total[$__rate_interval]))",
                    "{{service_name}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Replies to agent programs a second",
            (
                Query(
                    "sum by (swerve_harness, swerve_kind) (rate(swerve_program_replies_total[$__rate_interval]))",
                    "{{swerve_harness}} {{swerve_kind}}",
                ),
            ),
            "ops",
            stacked=True,
            description="`not_taken` replies are not turns; asides are trained only if the recipe says so",
        ),
        Panel(
            "Replies that agent programs sent back a second, by what became of them",
            (
                Query(
                    "sum by (swerve_harness, swerve_copy) (rate(swerve_program_copies_total[$__rate_interval]))",
                    "{{swerve_harness}} {{swerve_copy}}",
                ),
            ),
            "ops",
            stacked=True,
        ),
    ),
)

ENGINES = Dashboard(
    "swerve-engines",
    "Swerve: engines",
    (
        Panel(
            "Requests in the engines",
            (
                Query("sum by (instance) (sglang_num_running_reqs)", "{{instance}} running"),
                Query("sum by (instance) (sglang_num_queue_reqs)", "{{instance}} waiting"),
            ),
        ),
        Panel(
            "Tokens a second",
            (
                Query(
                    "sum by (instance) (rate(sglang_generation_tokens_total[$__rate_interval]))",
                    "{{instance}} sampled",
                ),
                Query(
                    "sum by (instance) (rate(sglang_prompt_tokens_total[$__rate_interval]))",
                    "{{instance}} prompt",
                ),
            ),
            "ops",
        ),
        Panel(
            "KV cache in use",
            (Query("max by (instance) (sglang_token_usage)", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Share of prompts that the prefix cache had",
            (Query("max by (instance) (sglang_cache_hit_rate)", "{{instance}}"),),
            "percentunit",
        ),
        quantiles("Time of a request in the engine", "sglang_e2e_request_latency_seconds", "instance"),
        quantiles("Time to the first token", "sglang_time_to_first_token_seconds", "instance"),
        quantiles("Time in the engine's queue", "sglang_queue_time_seconds", "instance"),
        Panel(
            "Share of time without work",
            (Query("rate(sglang_scheduler_idle_seconds_total[$__rate_interval])", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Requests that are paused for new weights",
            (Query("sum by (instance) (sglang_num_paused_reqs)", "{{instance}}"),),
        ),
        Panel(
            "Engines that the router reaches",
            (Query("sum by (instance) (smg_worker_health)", "{{instance}}"),),
        ),
        Panel(
            "Answers of the router a second",
            (
                Query(
                    "sum by (path, status_code) (rate(smg_http_responses_total[$__rate_interval]))",
                    "{{path}} {{status_code}}",
                ),
            ),
            "ops",
        ),
        quantiles("Time of a request in the router", "smg_http_request_duration_seconds", "path"),
    ),
)

DASHBOARDS = (TRAINING, FLEET, ENGINES)


FOLDER = Path(__file__).parent / "grafana/dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def grafana_dashboard(dashboard: Dashboard) -> dict[str, object]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["swerve"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_runs(dashboard.run_metric)] if dashboard.run_metric else []},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _runs(metric: str) -> Mapping[str, object]:
    return {
        "name": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({metric}, swerve_run)",
        "refresh": 2,
        "sort": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> Mapping[str, object]:
    row, column = divmod(number, COLUMNS)
    stacking = {"mode": "normal" if panel.stacked else "none"}
    drawn = {"fillOpacity": 40 if panel.stacked else 0, "stacking": stacking, "spanNulls": True}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": drawn}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query.expression, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }


def files() -> dict[Path, str]:
    """The content of each file."""
    return {
        FOLDER / f"{each.uid}.json": json.dumps(grafana_dashboard(each), indent=2) + "\n"
        for each in DASHBOARDS
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("infra.observe.dashboards"), description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say which files are not up to date"
    )
    arguments = parser.parse_args(argv)
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if arguments.check:
            print(f"{path} is not up to date: run python -m infra.observe.dashboards", file=sys.stderr)
        else:
            path.write_text(files()[path])
            print(path)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
