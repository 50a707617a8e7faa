"""`python -m trainer.evaluate`: how well something solves tasks.

    RECIPE.toml --run-dir DIR                             weights of ours: a checkpoint, or a Hugging Face directory
    TASKS.jsonl --api-base URL --model NAME --agent FILE --out DIR
                                                          any model behind an OpenAI-compatible server
    compare A B                                           two evaluations of the second kind, task by task

Each has its own --help: `python -m trainer.evaluate RECIPE.toml --help`, and so on.
"""

import sys

from pipeline.commandline import program
from trainer.evaluate import compare, endpoint

USAGE = f"usage: {program('trainer.evaluate')} {{RECIPE.toml | TASKS.jsonl | compare}} ..."


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    if any(word.endswith(".toml") and not _is_harness(words, place) for place, word in enumerate(words)):
        from trainer.evaluate import weights

        return weights.main()
    if not words or words in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{(__doc__ or '').strip()}")
        return 0 if words else 2
    return endpoint.main(words)


def _is_harness(words: list[str], place: int) -> bool:
    """Whether the argument names the file of an agent program, which is TOML like a recipe."""
    return words[place].startswith("--harness=") or words[max(place - 1, 0)] == "--harness"


if __name__ == "__main__":
    sys.exit(main())
