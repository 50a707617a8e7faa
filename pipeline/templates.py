"""`python -m pipeline.templates FILE|DIRECTORY…`: the fate of chat templates, as a table.

The table covers agents whose commands are text, and agents that call tools: whether a template is accepted, and whether a context that only
grows equals the template's rendering of the whole conversation. The replies are what a model would write: the template's own text of its
newest reply. If the two texts differ, `ChatTemplate.announcements` has to name the difference, and so does the plan of a run that uses the
template; an unannounced difference is a defect of ours.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from msgspec.structs import replace

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage, recognised
from pipeline.chat_template import ChatTemplate, Difference, call_and_results
from pipeline.commandline import program
from pipeline.errors import RequestError
from pipeline.message import Message
from pipeline.tokenizer import TokenizerBundle, read_bundle

Replies = Literal["words", "thoughts", "spaced", "calls", "calls with thoughts"]
TEXT_REPLIES: tuple[Replies, ...] = ("words", "thoughts", "spaced")
CALL_REPLIES: tuple[Replies, ...] = ("words", "calls", "calls with thoughts")

# The announcements that can explain a difference, by the replies that show it.
# Some templates write an empty thought into a newest reply without one, so that dropping thoughts explains a difference of any replies.
_ANYWHERE: tuple[Difference, ...] = ("system", "opening", "end", "thoughts")
_EXPLAINED: dict[Replies, frozenset[Difference]] = {
    "words": frozenset({*_ANYWHERE, "tools"}),
    "thoughts": frozenset(_ANYWHERE),
    "spaced": frozenset({*_ANYWHERE, "whitespace"}),
    "calls": frozenset({*_ANYWHERE, "tools"}),
    "calls with thoughts": frozenset({*_ANYWHERE, "tools"}),
}


class Verdict(Message, frozen=True, kw_only=True):
    """The result for one template, for agents whose commands are text or tool calls."""

    refused: str = ""  # the reason; "" if it is accepted
    announced: tuple[str, ...] = ()
    differs: tuple[Replies, ...] = ()  # replies with which the two texts differ
    unannounced: tuple[Replies, ...] = ()  # those of them that nothing announces

    @property
    def words(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        if self.unannounced:
            return f"differs, unannounced: {', '.join(self.unannounced)}"
        if self.differs:
            return f"differs, announced: {', '.join(self.differs)}"
        return "equal to a full re-render"


def judge(bundle: TokenizerBundle, *, with_tools: bool) -> Verdict:
    """Compare the two texts for each kind of reply."""
    try:
        template = ChatTemplate(bundle, (BASH_TOOL,) if with_tools else ())
        kinds: tuple[Replies, ...] = CALL_REPLIES if with_tools else TEXT_REPLIES
        differs: list[Replies] = [kind for kind in kinds if not _is_equal(template, kind)]
    except RequestError as error:
        return Verdict(refused=str(error).removeprefix("chat_template: "))
    about = {one.about for one in template.announcements}
    return Verdict(
        announced=tuple(one.text for one in template.announcements),
        differs=tuple(differs),
        unannounced=tuple(kind for kind in differs if not about & _EXPLAINED[kind]),
    )


def _is_equal(template: ChatTemplate, kind: Replies) -> bool:
    """Whether three turns in a row have the same text in both renderings."""
    told = [ChatMessage("system", uuid4().hex), ChatMessage("user", uuid4().hex)]
    grown = template.render(told)
    for reply, *others in _turns(template, kind):
        grown += _written(template, told, reply) + template.after_reply(others)
        told += [reply, *others]
    return grown == template.rerender(told)


def _turns(template: ChatTemplate, kind: Replies) -> Iterator[list[ChatMessage]]:
    """Lists of messages, each a reply and the messages after it."""
    for _ in range(3):
        words = uuid4().hex
        reasoning = uuid4().hex if "thoughts" in kind else ""
        if kind.startswith("calls"):
            results = [ChatMessage("tool", uuid4().hex), ChatMessage("tool", uuid4().hex)]
            yield call_and_results(words, results, one_call=template.has_one_call, reasoning=reasoning)
        else:
            content = f"\n {words}\n" if kind == "spaced" else words
            yield [ChatMessage("assistant", content, reasoning=reasoning), ChatMessage("user", uuid4().hex)]


def _written(template: ChatTemplate, told: Sequence[ChatMessage], reply: ChatMessage) -> str:
    """The text that a model would write for `reply`, up to where `after_reply` begins.

    A rendering may trim the content, a model does not.
    """
    words = reply.content.strip()
    prompt = template.rerender(told)
    newest = template.rerender([*told, replace(reply, content=words)], opening=False)
    shared = _num_shared(prompt, newest)
    if reply.tool_calls:
        command = reply.tool_calls[-1].arguments.split('"')[-2]
        return newest[shared : newest.rfind(command) + len(command)]
    if shared < len(prompt):  # the prompt has begun the reply otherwise than the template renders it later
        return f"{reply.reasoning}\n</think>\n\n{reply.content}" if reply.reasoning else reply.content
    return newest[shared:].removesuffix(template.final_end).replace(words, reply.content)


def _num_shared(one: str, other: str) -> int:
    """The number of leading characters that both have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a difference is not announced, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog=program("pipeline.templates"), description=__doc__)
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
        print(f"error: {error}", file=sys.stderr)
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
    """Each template at `path` with its name. Raises ValueError if it has none."""
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
