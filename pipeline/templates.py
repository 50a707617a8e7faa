"""`python -m pipeline.templates FILE|DIRECTORY…`: what becomes of chat templates here, as a table.

For agents whose commands are text, and for those who call tools: whether a template is accepted, and whether a context that only grows
is equal to the template's rendering of the whole conversation. A difference is announced in the plan of a run that uses the template.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.reply_format import recognised
from pipeline.template_table import Verdict, judge
from pipeline.tokenizer import TokenizerBundle, read_bundle


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a difference is not announced, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.templates", description=__doc__)
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="FILE|DIRECTORY",
        help="a template in Jinja, a directory of such files, or a Hugging Face model directory",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME=VALUE",
        help="a further variable of the templates, such as enable_thinking=false; VALUE is JSON, or else text",
    )
    parser.add_argument("--announcements", action="store_true", help="print what the plan of a run would say")
    chosen = parser.parse_args(arguments)
    try:
        variables = dict(map(_variable, chosen.variables))
        bundles = [bundle for path in chosen.paths for bundle in _bundles(path, variables)]
    except ValueError as error:
        print(f"python -m pipeline.templates: {error}", file=sys.stderr)
        return 2
    return _print_table(bundles, with_announcements=chosen.announcements)


def _print_table(bundles: Sequence[tuple[str, TokenizerBundle]], *, with_announcements: bool) -> int:
    print("| template | thoughts, tool calls | commands are text | commands are tool calls |")
    print("|---|---|---|---|")
    announced: list[tuple[str, Verdict]] = []
    is_sound = True
    for name, bundle in bundles:
        text, calls = judge(bundle, with_tools=False), judge(bundle, with_tools=True)
        form = bundle.reply_format
        print(f"| {name} | {form.thoughts}, {form.tool_calls} | {_cell(text.words)} | {_cell(calls.words)} |")
        is_sound = is_sound and not text.unannounced and not calls.unannounced
        announced += [(f"{name}, text", text), (f"{name}, tool calls", calls)]
    for name, verdict in announced if with_announcements else ():
        if verdict.announced:
            print("\n".join([f"\n{name}:", *(f"- {text}" for text in verdict.announced)]))
    return 0 if is_sound else 1


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--set {text!r}: write it as NAME=VALUE, as in enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _bundles(path: Path, variables: dict[str, Any]) -> Iterator[tuple[str, TokenizerBundle]]:
    """Each template at `path` with its name. Raises ValueError if there is none."""
    if (path / "tokenizer_config.json").exists():
        yield path.resolve().name, read_bundle(path, template_kwargs=variables)
        return
    files = sorted(path.glob("*.jinja")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no .jinja file and no tokenizer_config.json")
    for file in files:
        try:
            source = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: {error}; give a chat template in Jinja") from error
        yield file.stem, _bundle_of(source, variables)


def _bundle_of(source: str, variables: dict[str, Any]) -> TokenizerBundle:
    """A bundle without a tokenizer, which rendering text does not need."""
    return TokenizerBundle(
        tokenizer_json=b"",
        chat_template=source,
        eos_token="</s>",
        bos_token="<s>",
        stop_token_ids=(),
        vocab_size=0,
        template_kwargs=variables,
        reply_format=recognised(source),
    )


if __name__ == "__main__":
    sys.exit(main())
