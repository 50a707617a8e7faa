"""Who writes where an endpoint is named, how it is asked, and what is kept of it; and the whole way in containers."""

import argparse
import asyncio
import base64
import re
from pathlib import Path

import pytest

from pipeline.taskfile import gold_path, provenance_path, read_gold, read_provenance, read_tasks
from tests.workers.making.author_server import AuthorServer, author_serving, in_turn
from tests.workers.making.commands import candidates
from tests.workers.making.pricing import with_history
from tests.workers.making.repositories import Repository
from tests.workers.making.shop import shop_at
from workers.making import author as author_module
from workers.making.author import (
    NO_REPLY,
    NoReply,
    Unusable,
    Written,
    add_author_options,
    author_of,
    author_settings,
)
from workers.making.candidates import CandidateBook
from workers.making.interfaces import with_interface
from workers.making.problems import added_lines
from workers.policy.endpoint import EndpointSettings
from workers.tasksets.__main__ import main


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_author_options(parser, writes="texts")
    return parser.parse_args(words)


def good(text: str) -> str:
    if "good" not in text:
        raise Unusable("it is not good")
    return text.upper()


def asked(server: AuthorServer, *words: str) -> Written[str]:
    author = author_of(options_of(*server.options, *words))
    assert author is not None

    async def ask() -> Written[str]:
        async with author.opened():
            return await author.write("Write something good.", good)

    return asyncio.run(ask())


def test_without_the_url_there_is_no_author_and_the_book_has_nothing_of_one() -> None:
    assert author_of(options_of()) is None
    assert author_settings(options_of()) == {}


def test_a_good_reply_is_used_without_its_thoughts() -> None:
    with author_serving(in_turn(["<think>bad?</think>a good one"])) as server:
        found = asked(server)
    assert (found.value, found.prompt) == ("A GOOD ONE", "Write something good.")
    assert server.bodies == [{"model": "tiny", "messages": [{"role": "user", "content": found.prompt}]}]
    assert "Authorization" not in server.headers[0]


def test_a_reply_that_cannot_be_used_is_asked_for_again_with_the_reason_and_without_the_reply() -> None:
    with author_serving(in_turn(["secret words", "good"])) as server:
        found = asked(server)
    assert found.value == "GOOD"
    assert found.prompt == server.prompts[1]
    assert server.prompts[1].startswith(server.prompts[0])
    assert "it is not good" in server.prompts[1]
    assert "secret" not in server.prompts[1]


def test_three_replies_that_cannot_be_used_are_all() -> None:
    replies = ["no", "never", "good " * 10_000, "good"]
    refused = pytest.raises(Unusable, match=r"^it is not good; it is too long$")
    with author_serving(in_turn(replies)) as server, refused:
        asked(server)
    assert len(server.prompts) == 3


def test_an_endpoint_that_refuses_is_no_reply_and_not_asked_again() -> None:
    refused = pytest.raises(NoReply, match=r"^--author-url: http.*: HTTP 404: no")
    with author_serving(in_turn([404])) as server, refused:
        asked(server)
    assert len(server.prompts) == 1


def test_an_endpoint_that_is_busy_is_asked_again_and_one_that_is_gone_gives_no_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with author_serving(in_turn([503, "good"])) as server:
        assert asked(server).value == "GOOD"
    monkeypatch.setattr(author_module, "SETTINGS", EndpointSettings(retry_budget_s=0, first_reply_s=0))
    with pytest.raises(NoReply, match=r"^--author-url: http.*gave up after 1 requests"):
        asked(server)


def test_the_key_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTHOR_KEY", "sk-1234")
    with author_serving(in_turn(["good"])) as server:
        asked(server, "--author-key-env", "AUTHOR_KEY")
        options = options_of(*server.options, "--author-key-env", "AUTHOR_KEY")
        server.script = in_turn([401])
        with pytest.raises(NoReply, match=r"the key comes from AUTHOR_KEY$") as refused:
            asked(server, "--author-key-env", "AUTHOR_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-1234"
    assert "sk-1234" not in f"{author_of(options)} {author_settings(options)} {refused.value}"


def test_a_login_in_the_url_is_sent_and_neither_kept_nor_shown() -> None:
    with author_serving(in_turn(["good", 404])) as server:
        address = server.url
        server.url = address.replace("//", "//ann:p%40ss@") + "/"
        assert asked(server).value == "GOOD"
        with pytest.raises(NoReply) as refused:
            asked(server)
        options = options_of(*server.options)
    encoded = base64.b64encode(b"ann:p@ss").decode()
    assert server.headers[0]["Authorization"] == f"Basic {encoded}"
    assert author_settings(options) == {"author_url": address, "author_model": "tiny"}
    assert not re.search(f"ann|p@ss|p%40ss|{encoded}", f"{refused.value} {author_of(options)}")


@pytest.mark.parametrize("command", ["from-git", "plant"])
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--author-url", "here", "--author-model", "m"], "--author-url 'here': give a URL, as in http"),
        (["--author-url", "http://127.0.0.1:1/v1"], "--author-model: name the model at --author-url"),
        (["--author-model", "m"], "--author-model: give --author-url, the URL of its endpoint"),
        (["--author-key-env", "NO_SUCH"], "--author-key-env: give --author-url"),
        (
            ["--author-url", "http://127.0.0.1:1/v1", "--author-model", "m", "--author-key-env", "NO_SUCH"],
            "--author-key-env: the environment variable NO_SUCH is not set",
        ),
        (
            ["--author-url", "http://a:b@127.0.0.1:1", "--author-model", "m", "--author-key-env", "PATH"],
            "--author-key-env: --author-url has a user's name already",
        ),
    ],
)
def test_misuse_is_one_line_that_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str], why: str
) -> None:
    made = shop_at(tmp_path / "shop")
    assert main([command, str(made.path), "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {why}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("kinds", ["model", "swap,model"])
def test_bugs_of_a_model_are_refused_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: str
) -> None:
    made = shop_at(tmp_path / "shop")
    assert main(["plant", str(made.path), "--out", str(tmp_path / "out"), "--kinds", kinds]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: --kinds: 'model' is none of line, .*; model needs --author-url\n", said)


def test_another_author_needs_another_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, out = shop_at(tmp_path / "shop"), tmp_path / "out"
    command = ["from-git", str(made.path), "--out", str(out)]
    url = ["--author-url", "http://127.0.0.1:1/v1"]
    assert main([*command, *url, "--author-model", "one"]) == 0
    capsys.readouterr()
    assert main([*command, *url, "--author-model", "two"]) == 2
    assert re.search(r"^error: --author-model: .* was made with one: give the same", capsys.readouterr().err)
    assert main([*command, "--author-url", "http://x:y@127.0.0.1:1/v1/", "--author-model", "one"]) == 0
    capsys.readouterr()
    assert main(command) == 2
    assert re.search(r"^error: --author-model: .* was made with one", capsys.readouterr().err)


REPORTS = {
    "test_half_cents": "# Half cents\n\nHalf a cent is rounded down where a discount is taken, as in a price of 499.5 cents.",
    "test_shipped": "# Shipping\n\nOrders lack `shipped`, which says the price of 1000 cents with shipping, 1490.",
    "test_free": "# Free shipping\n\nOrders of 6000 cents pay for shipping, although they should be free of it.",
}


def authored(prompt: str) -> str:
    """What the author replies about the repository of `pricing.py`."""
    if prompt.startswith("This text says"):
        return (
            "# Wrong prices\n\nOur shop saw this.\n"
            + prompt.partition("<text>\n")[2].partition("\n</text>")[0]
        )
    if prompt.startswith("This is a function"):
        function = prompt.partition("```python\n")[2].partition("```")[0]
        return f"Here it is:\n\n```python\n{function.replace('490', '491')}```\n"
    named = [name for name in REPORTS if f"::{name}\n" in prompt]
    return REPORTS[named[-1]] if named else "Too short."


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_an_author_writes_problems_of_commits_and_bugs_and_is_asked_again_only_where_it_gave_none(
    tmp_path: Path, repository: Repository, task_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shas, out = with_history(repository), tmp_path / "out"
    words = ["--repeat", "1", "--base", task_image]
    with author_serving(in_turn([400])) as server:
        command = ["from-git", str(repository.path), "--out", str(out), *words, *server.options]
        assert main(command) == 1
        failed = [one for one in candidates(out) if one.outcome == "failed"]
        assert {(one.stage, one.reason) for one in failed} == {("candidate", NO_REPLY)}
        assert {shas["fix"], shas["merge"], shas["packaged fix"]} <= {one.sha for one in failed}
        images = {one.sha: one.task.image for one in failed if one.task}
        server.script = authored
        assert main(command) == 0
        book = CandidateBook.read(out / "candidates.jsonl")
        ends = {name: book.candidates[sha] for name, sha in shas.items()}
        kept = [ends[name] for name in ("packaged fix", "merge", "fix")]
        assert [one.outcome for one in kept] == ["kept"] * 3, kept
        for one in kept:
            assert one.task
            assert one.task.image == images[one.sha]
        for name in ("refactoring", "given away"):
            assert (ends[name].stage, ends[name].reason) == ("candidate", "tests pass without the fix")
        tasks, golds = read_tasks(out / "train.jsonl"), read_gold(gold_path(out / "train.jsonl"))
        reports = [
            with_interface(text, one.interface)
            for text, one in zip(reversed(REPORTS.values()), kept, strict=True)
        ]
        assert [task.problem for task in tasks] == reports
        assert [one.interface for one in kept] == [(), ("- `def shipped(cents)` in `pricing.py`",), ()]
        for one, task in zip(kept, tasks, strict=True):
            (prompt,) = one.author_saw
            assert prompt in server.prompts
            assert not any(line in prompt for line in added_lines(golds[task.id].patch))
            assert "Error" in prompt.partition("<output>")[2]
        where = list(read_provenance(provenance_path(out / "train.jsonl")).values())
        assert {one.problem_source for one in where} == {"author tiny: commit message, failing tests"}
        num_asked, before = len(server.prompts), (out / "candidates.jsonl").read_bytes()
        assert main(command) == 0
        assert (len(server.prompts), (out / "candidates.jsonl").read_bytes()) == (num_asked, before)
        planted = tmp_path / "planted"
        command = ["plant", str(repository.path), "--out", str(planted), *words, *server.options]
        command += ["--kinds", "model", "--most", "1"]
        assert main(command) == 0
        num_asked = len(server.prompts)
        assert main(command) == 0
        assert len(server.prompts) == num_asked
    (one,) = (one for one in candidates(planted) if one.outcome == "kept")
    assert (one.bugs, one.problem_source) == (("model",), "author tiny: failing calls")
    assert one.gold
    assert one.task
    assert "-    return cents if cents >= 5000 else cents + 491\n" in one.gold.patch
    assert one.task.problem.startswith("# Wrong prices\n")
    assert read_tasks(planted / "train.jsonl") == [one.task]
    capsys.readouterr()
