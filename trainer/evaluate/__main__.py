"""`python -m trainer.evaluate`: how well something solves tasks.

    RECIPE.toml --run-dir DIR                             weights of ours: a checkpoint, or a Hugging Face directory
    TASKS.jsonl --api-base URL --model NAME --agent FILE --out DIR
                                                          any model behind an OpenAI-compatible server
    compare A B                                           two evaluations of the second kind, task by task

Each has its own --help: `python -m trainer.evaluate RECIPE.toml --help`, and so on.
"""

import sys

from trainer.evaluate import compare, endpoint

USAGE = "usage: python -m trainer.evaluate {RECIPE.toml | TASKS.jsonl | compare} ..."


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    if any(word.endswith(".toml") for word in words):
        from trainer.evaluate import weights

        return weights.main()
    if not words or words in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{(__doc__ or '').strip()}")
        return 0 if words else 2
    return endpoint.main(words)


if __name__ == "__main__":
    sys.exit(main())
