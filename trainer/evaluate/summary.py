"""What an evaluation comes to: rates with intervals, pass@k and totals, as an object and as a table."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from trainer.evaluate.results import EpisodeResult, graded_runs
from trainer.records.statistics import Estimate, estimate, pass_at, rate


def summary_of(
    rows: Sequence[EpisodeResult], *, model: str, data: str, samples: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """`resolved`, `total` and `resolve_rate` count tasks by their first episode, as the older systems do; `success` is the
    mean over all graded episodes of a task, then over tasks.
    """
    firsts = [row for row in rows if row.sample == 0]
    runs = graded_runs(rows)
    success = estimate([rate(each) for each in runs.values() if each])
    num_resolved = sum(row.resolved is True for row in firsts)
    pass_k = {f"pass@{k}": pass_at(runs, k) for k in range(1, samples + 1)}
    return {
        "model": model,
        "data": data,
        "total": len(firsts),
        "resolved": num_resolved,
        "resolve_rate": round(num_resolved / len(firsts), 4) if firsts else 0.0,
        "episodes": len(rows),
        "errors": sum(row.resolved is None for row in rows),
        "no_patch": sum(not row.patch_source for row in rows),
        "avg_steps": _mean([row.n_steps for row in rows]),
        "avg_elapsed_s": _mean([row.elapsed for row in rows]),
        "success": _told(success),
        **{name: _told(one) for name, one in pass_k.items()},
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "completion_tokens": sum(row.completion_tokens for row in rows),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": dict(arguments),
    }


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people; rates in percent with their 95 % interval."""
    lines = [
        f"{summary['model']}: {summary['resolved']} of {summary['total']} tasks resolved by their first episode",
        f"episodes      {summary['episodes']}, of them {summary['errors']} without a verdict, {summary['no_patch']} without a patch",
        f"success       {_percent(summary['success'])}",
    ]
    lines += [f"{name:14}{_percent(one)}" for name, one in summary.items() if name.startswith("pass@")]
    lines.append(
        f"per episode   {summary['avg_steps']:.1f} turns, {summary['avg_elapsed_s']:.1f} s; in all "
        f"{summary['prompt_tokens']:,} tokens in, {summary['completion_tokens']:,} out"
    )
    return "\n".join(lines)


def _told(one: Estimate | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)


def _percent(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    value, low, high = (100 * one[name] for name in ("value", "low", "high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f}; {one['num_tasks']} tasks)"


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 2) if values else 0.0
