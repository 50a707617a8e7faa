"""What Prometheus would read of a process: the series that it serves."""

import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: dict[str, str]
    value: float


def scraped(url: str) -> list[Series]:
    """The series of `url`, in the order in which they are served."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return parsed(response.read().decode())


def parsed(text: str) -> list[Series]:
    families = text_string_to_metric_families(text)
    return [
        Series(sample.name, sample.labels, sample.value) for family in families for sample in family.samples
    ]


def values(series: Iterable[Series], name: str, **labels: str) -> list[float]:
    """Of the series of this name that have these labels."""
    return [one.value for one in series if one.name == name and labels.items() <= one.labels.items()]
