"""The queries of dashboards and alerts, and what each of them wants of the series that are there."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import promql_parser as promql
import yaml

OBSERVE = Path("infra/observe")
VARIABLES = {"$__rate_interval": "5m", "$run": ".+"}
# Prometheus itself gives each series the address that it was read from.
GIVEN = {"instance", "job", "le"}


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric with the conditions on its labels, and the labels that the query groups or shows by."""

    name: str
    matchers: tuple[tuple[str, Callable[[str], bool]], ...]

    def takes(self, labels: dict[str, str]) -> bool:
        return all(condition(labels.get(label, "")) for label, condition in self.matchers)


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where each query stands, the query, and the text that shows labels of its result."""
    for path in sorted((OBSERVE / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                yield f"{path.stem}: {panel['title']}", expression, target["legendFormat"]
    for group in yaml.safe_load((OBSERVE / "rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"], rule["annotations"]["summary"]


def shown_labels(text: str) -> set[str]:
    """In a legend of Grafana, or in the summary of an alert."""
    return set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text)) - {"value"}


def selectors(expression: str) -> list[Selector]:
    found: list[Selector] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql.VectorSelector):
            matchers = tuple((one.name, _condition(one)) for one in node.matchers.matchers)
            name = node.name or next(one.value for one in node.matchers.matchers if one.name == "__name__")
            found.append(Selector(name, tuple(one for one in matchers if one[0] != "__name__")))
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def grouping_labels(expression: str) -> set[str]:
    """By which an aggregation of the query groups."""
    found: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def _condition(matcher: promql.Matcher) -> Callable[[str], bool]:
    value = matcher.value
    match matcher.op:
        case promql.MatchOp.Equal:
            return lambda label: label == value
        case promql.MatchOp.NotEqual:
            return lambda label: label != value
        case promql.MatchOp.Re:
            return lambda label: re.fullmatch(value, label) is not None
        case _:
            return lambda label: re.fullmatch(value, label) is None
