"""What a change of habit alone would bring: `python -m benchmarks.habits [POLICY ...]`.

Plays the demo's held-out tasks in simulation (benchmarks/simulation), with each policy as it is and with each policy forced into a habit:
wherever the habit applies, the policy's next reply must begin with the thought with which the teacher of its lessons begins that action.
A policy is a Hugging Face directory, such as trainer/demo/policy or a version under runs/demo/weights.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.command import prepare_process
from pipeline.intervals import wilson_interval
from trainer.demo.family import Split, make_tasks

if TYPE_CHECKING:
    from benchmarks.simulation.episodes import Episode

SPLITS: tuple[Split, ...] = ("heldout", "unseen")


def _checks(episode: "Episode") -> str:
    return "THOUGHT: test it." if "sed -i" in _last(episode) else ""


def _starts_over(episode: "Episode") -> str:
    refuted = "python3 -c" in _last(episode) and not episode.solved_after[-1]
    return "THOUGHT: not right, start over." if refuted else ""


def _checks_and_starts_over(episode: "Episode") -> str:
    return _checks(episode) or _starts_over(episode)


HABITS: dict[str, Callable[["Episode"], str]] = {
    "none": lambda _: "",
    "runs a check after each edit": _checks,
    "starts over after a check that failed": _starts_over,
    "both": _checks_and_starts_over,
}


def _last(episode: "Episode") -> str:
    """The command of the last turn; empty before the first and for a format error."""
    return (episode.commands[-1] or "") if episode.commands else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.habits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "policies", nargs="*", type=Path, metavar="POLICY", help="default trainer/demo/policy"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks and of the sampling")
    parser.add_argument("--episodes", type=int, default=256, help="of each policy with each habit")
    options = parser.parse_args(argv)
    prepare_process()

    from benchmarks.simulation.cell import POLICY

    print("| policy | forced habit | held out | unseen kinds |\n|---|---|--:|--:|")
    for policy in options.policies or [POLICY]:
        for habit in HABITS:
            shares = _played(policy, habit, seed=options.seed, num_episodes=options.episodes)
            print(f"| {policy} | {habit} | {' | '.join(map(_said, shares))} |", flush=True)
    return 0


def _played(policy: Path, habit: str, *, seed: int, num_episodes: int) -> list[tuple[float, int]]:
    """Success and number of episodes for each of SPLITS."""
    from benchmarks.simulation.cell import workbench
    from benchmarks.simulation.llama import read_weights

    shares: list[tuple[float, int]] = []
    with workbench() as bench:
        weights = read_weights(policy)
        for split in SPLITS:
            count = num_episodes if split == "heldout" else num_episodes // 2
            tasks, draw = make_tasks(seed, split, count), (split, seed)
            episodes = bench.play(tasks, weights, version=-1, draw=draw, forced=HABITS[habit])
            shares.append((sum(one.reward for one in episodes) / count, count))
    return shares


def _said(share: tuple[float, int]) -> str:
    value, count = share
    low, high = wilson_interval(value, count)
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f}), n = {count}"


if __name__ == "__main__":
    raise SystemExit(main())
