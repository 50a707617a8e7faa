"""Writes the dashboards of `panels.py` as the files that Grafana reads: `python -m infra.observe.dashboards [--check]`.

With `--check` nothing is written, and exit status 1 says which files are not as they would be written.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.observe.panels import DASHBOARDS, Dashboard, Panel

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
    """What each file holds."""
    return {
        FOLDER / f"{each.uid}.json": json.dumps(grafana_dashboard(each), indent=2) + "\n"
        for each in DASHBOARDS
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.observe.dashboards", description=__doc__)
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
