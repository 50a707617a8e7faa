"""`python -m trainer.recipe --reference`: prints docs/recipe.md, the reference of every key of a recipe."""

import argparse
import sys

from trainer.recipe.reference import reference


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.recipe", description=__doc__)
    parser.add_argument(
        "--reference", action="store_true", required=True, help="print the reference as Markdown"
    )
    parser.parse_args(argv)
    print(reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
