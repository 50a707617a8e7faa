"""Forests at random: whatever programs do to their copies, each sampled token is in exactly one sample, behind exactly its prompt.

`python -m tests.workers.foreign.test_forests 100000` tries as many.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.message import pack_float32s, pack_int32s
from pipeline.trajectory import Turn, VersionSpan, reply_digest
from tests.trainer.trajectories import trajectory
from trainer.batching.samples import samples_of
from workers.foreign.conversations import ChatPiece, Node, Tree, messages_of, turns_of
from workers.foreign.dialect import Dialect
from workers.foreign.dialects.chat import ChatDialect
from workers.foreign.dialects.messages import MessagesDialect
from workers.foreign.dialects.responses import ResponsesDialect

Json = dict[str, Any]
WORDS = ("", "a", "b", " a\n")  # few, so that conversations are often alike
VOCAB_SIZE = 512


class ChatForm:
    dialect: Dialect = ChatDialect()

    def told(self, role: str, text: str, chance: random.Random) -> list[Json]:
        content: Any = text
        if chance.random() < 0.5 and text:
            content = [
                {"type": "text", "text": text[:1]},
                {"type": "text", "text": text[1:]},
            ]
        return [{"role": role, "content": content}]

    def reply(self, said: ChatMessage, chance: random.Random) -> list[Json]:
        made: Json = {"role": "assistant", "content": said.content or chance.choice(["", None, []])}
        if said.reasoning:
            made["reasoning_content"] = said.reasoning
        if said.tool_calls:
            made["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in said.tool_calls
            ]
        return [made]

    def results(self, given: Sequence[tuple[str, str]], chance: random.Random) -> list[Json]:
        return [{"role": "tool", "tool_call_id": one, "content": text, "name": "x"} for one, text in given]

    def body(self, wire: Sequence[Json], tools: Sequence[str]) -> Json:
        described = [{"type": "function", "function": {"name": name}} for name in tools]
        return {"messages": list(wire), "tools": described}


class ResponsesForm(ChatForm):
    dialect: Dialect = ResponsesDialect()

    def told(self, role: str, text: str, chance: random.Random) -> list[Json]:
        content: Any = [{"type": "input_text", "text": text}] if chance.random() < 0.5 else text
        return [{"type": "message", "role": role, "content": content}]

    def reply(self, said: ChatMessage, chance: random.Random) -> list[Json]:
        made: list[Json] = []
        if said.reasoning:
            made.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": said.reasoning}]})
        if said.content or not (said.tool_calls or said.reasoning):
            made += self.told("assistant", said.content, chance)
        return made + [
            {"type": "function_call", "call_id": one.id, "name": one.name, "arguments": one.arguments}
            for one in said.tool_calls
        ]

    def results(self, given: Sequence[tuple[str, str]], chance: random.Random) -> list[Json]:
        return [{"type": "function_call_output", "call_id": one, "output": text} for one, text in given]

    def body(self, wire: Sequence[Json], tools: Sequence[str]) -> Json:
        return {"input": list(wire), "tools": [{"type": "function", "name": name} for name in tools]}


class MessagesForm(ChatForm):
    dialect: Dialect = MessagesDialect()

    def reply(self, said: ChatMessage, chance: random.Random) -> list[Json]:
        made: list[Json] = []
        if said.reasoning:
            made.append({"type": "thinking", "thinking": said.reasoning, "signature": "s"})
        if said.content:
            made.append({"type": "text", "text": said.content})
        for one in said.tool_calls:
            try:
                arguments = json.loads(one.arguments)
            except ValueError:
                arguments = {"__unparsedToolInput": one.arguments}
            made.append({"type": "tool_use", "id": one.id, "name": one.name, "input": arguments})
        return [{"role": "assistant", "content": made}]

    def results(self, given: Sequence[tuple[str, str]], chance: random.Random) -> list[Json]:
        made = [{"type": "tool_result", "tool_use_id": one, "content": text} for one, text in given]
        return [{"role": "user", "content": made}]

    def body(self, wire: Sequence[Json], tools: Sequence[str]) -> Json:
        return {"messages": list(wire), "tools": [{"name": name} for name in tools]}


FORMS = (ChatForm(), ResponsesForm(), MessagesForm())


@dataclass(slots=True)
class Held:
    """What a program holds of one conversation."""

    form: ChatForm
    tools: tuple[str, ...]
    wire: list[Json]
    last: Node | None = None  # the newest reply whose copy is in it
    newest: Node | None = None  # the reply to it; None: the program did not get it


@dataclass(slots=True)
class Forest:
    """Programs that play, with a tree that finds their replies."""

    chance: random.Random
    tree: Tree = field(default_factory=Tree)
    held: list[Held] = field(default_factory=list[Held])
    prompts: dict[Node, list[int]] = field(default_factory=dict[Node, list[int]])
    drawn: dict[Node, list[int]] = field(default_factory=dict[Node, list[int]])
    num_asked: int = 0

    def step(self) -> None:
        if not self.held or self.chance.random() < 0.2:
            form = self.chance.choice(FORMS)
            tools = self.chance.choice([(), ("bash",), ("bash", "edit")])
            wire = form.told("user", self.word(), self.chance)
            if self.chance.random() < 0.3:  # invented by the program
                wire += form.told("assistant", self.chance.choice(["Got it.", self.word()]), self.chance)
                wire += form.told("user", self.word(), self.chance)
            self.ask(Held(form, tools, wire))
            return
        held = self.chance.choice(self.held)
        longer = Held(held.form, held.tools, list(held.wire), held.last)
        if held.newest is None or self.chance.random() < 0.15:
            # Its newest reply is dropped, and perhaps the message before it is longer.
            longer.wire += (
                held.form.told("user", self.word(), self.chance) if self.chance.random() < 0.7 else []
            )
        else:
            self.send_back(longer, held.newest)
        self.ask(longer)

    def send_back(self, held: Held, node: Node) -> None:
        """Put the program's copy of its newest reply into the conversation, and what came of it."""
        chance, said = self.chance, self.edited(node.said)
        results = [(one.id, self.word()) for one in node.said.tool_calls]
        parts: list[Json] = []
        if len(results) > 1 and chance.random() < 0.3:
            for number, one in enumerate(said.tool_calls):
                first = said if number == 0 else ChatMessage("assistant", "")
                parts += held.form.reply(replace(first, tool_calls=(one,)), chance)
                parts += held.form.results(results[number : number + 1], chance)
        else:
            parts += held.form.reply(said, chance)
            chance.shuffle(results)
            if results:
                parts += held.form.results(results, chance)
        held.wire += parts
        held.last = node
        if not results or chance.random() < 0.3:
            held.wire += held.form.told("user", self.word(), chance)

    def edited(self, said: ChatMessage) -> ChatMessage:
        chance = self.chance
        said = replace(said, reasoning=chance.choice([said.reasoning, said.reasoning.strip(), ""]))
        return replace(said, tool_calls=tuple(self.edited_call(one) for one in said.tool_calls))

    def edited_call(self, one: ToolCall) -> ToolCall:
        kind = self.chance.randrange(4)
        if kind == 0:
            return replace(one, name="invalid", arguments='{"error": "x"}')
        if kind == 1:
            return replace(one, arguments="{}")
        if kind == 2:
            try:
                return replace(one, arguments=json.dumps(json.loads(one.arguments), separators=(",", ":")))
            except ValueError:
                return one
        return one

    def word(self) -> str:
        others = [node.said.content for node in self.tree.nodes[-3:]]  # a quotation
        return self.chance.choice([*WORDS[1:], *others])

    def ask(self, held: Held) -> None:
        wire = [with_transport(one, self.chance) for one in held.wire]
        asked = held.form.dialect.read(held.form.body(wire, held.tools))
        place = self.tree.place(asked.pieces, asked.tools.key)
        if held.last is not None:
            assert place.parent is not None, "a reply was not found"
            assert said_by(place.parent)[: len(said_by(held.last))] == said_by(held.last)
        self.tree.note_copies(place)
        for node, _ in place.copies:
            node.is_taken = True
        before = [] if place.parent is None else place.parent.ids()
        prompt = [*before, *rendered(place.told), 1]
        node = self.sampled(place.parent, asked.tools.key, place.told, prompt, len(before))
        self.held.append(Held(held.form, held.tools, held.wire, held.last, node if node.is_taken else None))

    def sampled(
        self, parent: Node | None, key: bytes, told: tuple[ChatPiece, ...], prompt: list[int], kept: int
    ) -> Node:
        chance, number = self.chance, self.num_asked
        self.num_asked += 1
        ids = [chance.randrange(2, VOCAB_SIZE) for _ in range(chance.randint(1, 4))]
        calls = [
            ToolCall(name="bash", arguments=chance.choice(['{"a": 1.0}', "{}", '{"a": ', '"x"']))
            for _ in range(chance.choice([0, 0, 1, 1, 2, 3]) if key else 0)
        ]
        said = ChatMessage("assistant", chance.choice(WORDS), reasoning=chance.choice(["", " why "]))
        said = self.tree.name_calls(replace(said, tool_calls=tuple(calls)), number)
        logprobs = [-0.5] * len(ids)
        turn = Turn(
            kept_tokens=kept,
            fed=pack_int32s(prompt[kept:]),
            sampled=pack_int32s(ids),
            logprobs=pack_float32s(logprobs),
            versions=(VersionSpan(number, 0, len(ids)),),
            stop="stop",
            text=said.content,
            reply=said,
            told=messages_of(told),
            digest=reply_digest(pack_int32s(prompt), pack_int32s(ids), pack_float32s(logprobs)),
        )
        node = Node(number, parent, key, told, said, turn)
        node.is_taken = chance.random() < 0.9
        self.tree.add(node)
        self.prompts[node], self.drawn[node] = prompt, ids
        return node

    def check(self) -> None:
        turns = turns_of(self.tree)
        expected = sorted(
            (self.prompts[node], self.drawn[node]) for node, turn in turns.items() if not turn.aside
        )
        trained: list[tuple[list[int], list[int]]] = []
        for sample in samples_of(trajectory(*turns.values()), vocab_size=VOCAB_SIZE, max_tokens=10**6):
            tokens = sample.tokens_T.tolist()
            trained += [(tokens[: one.start], tokens[one.start : one.end]) for one in sample.replies]
            assert sum(one.end - one.start for one in sample.replies) == int(sample.trained_T.sum())
        assert sorted(trained) == expected


def with_transport(message: Json, chance: random.Random) -> Json:
    """The message with fields that say nothing and are others each time."""
    noise: Json = {"id": str(chance.random()), "status": "completed", "provider_specific_fields": {}}
    content = message.get("content")
    if isinstance(content, list):
        noise["content"] = [with_marks(part, chance) for part in content]
    return {**message, **noise}


def with_marks(part: Json, chance: random.Random) -> Json:
    marked = {**part, "cache_control": {"ttl": chance.random()}} if chance.random() < 0.3 else part
    return (
        {**marked, "is_error": False} if part["type"] == "tool_result" and chance.random() < 0.5 else marked
    )


def rendered(told: Sequence[ChatPiece]) -> list[int]:
    """Ids that tell any two conversations apart."""
    return [2 + ord(letter) % 500 for letter in repr([(one.role, one.text, one.call) for one in told])]


def said_by(node: Node) -> list[tuple[str, str, int]]:
    """What a path says, whoever of equal ones said it: a program may have invented the words of another conversation's reply."""
    made: list[tuple[str, str, int]] = []
    for one in node.path():
        made += [(piece.role, piece.text, 0) for piece in one.told]
        made.append(("assistant", one.said.content, len(one.said.tool_calls)))
    return made


def grow(seed: int, num_steps: int) -> None:
    forest = Forest(random.Random(seed))
    for _ in range(num_steps):
        forest.step()
    forest.check()


@given(st.integers(0, 2**40), st.integers(1, 14))
@settings(max_examples=300)
def test_each_sampled_token_is_in_exactly_one_sample_behind_exactly_its_prompt(
    seed: int, num_steps: int
) -> None:
    grow(seed, num_steps)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        try:
            grow(seed, 1 + seed % 14)
        except BaseException:
            sys.stdout.write(f"seed {seed}, {1 + seed % 14} steps\n")
            raise
