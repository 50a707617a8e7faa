"""Repositories in Go: what is code, what means the same, what is required, and the whole way in containers."""

from pathlib import Path

import pytest

from infra.images.build import IMAGES, ensure_image
from pipeline.taskfile import read_gold, read_tasks, read_verified, verified_path
from tests.workers.making.commands import candidates, finished
from tests.workers.making.repositories import Repository
from workers.making.ecosystems.ecosystem import BaseEnvironment
from workers.making.ecosystems.go import ECOSYSTEM as GO
from workers.making.history import Fallen, History

MOD = "module example.com/price\n\ngo 1.19\n"
PRICE = """package price

// Discounted is the price in cents after a discount in percent.
func Discounted(cents, percent int) int {
	return cents - cents*percent/100
}
"""
MENDED = PRICE.replace("cents*percent/100", "(cents*percent+50)/100")
TESTS = """package price

import (
	"os"
	"testing"
)

func TestWhole(t *testing.T) {
	if got := Discounted(200, 10); got != 180 {
		t.Errorf("got %d", got)
	}
}

func TestHome(t *testing.T) {
	if os.Getenv("PRICE_HOME") == "" {
		t.Error("no home")
	}
}
"""
HALVES = """
func TestHalves(t *testing.T) {
	if got := Discounted(105, 10); got != 94 {
		t.Errorf("got %d", got)
	}
}
"""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("func f() int { return 1 }", "func f() int {\n\treturn 1\n}", True),
        ("func f() int {\n\treturn 1 }", "// F.\nfunc f()   int {\n\treturn   1 /* one */ }", True),
        ("func f() int {\n\treturn 1 }", "func f() int {\n\treturn 2 }", False),
        ('var a = "x  y"', 'var a = "x y"', False),
        ("func ExampleF() {\n\tf()\n\t// Output: 1\n}", "func ExampleF() {\n\tf()\n\t// Output: 2\n}", False),
        (
            "func ExampleF() {\n\tf()\n\t// Output:\n\t// 1\n}",
            "func ExampleF() {\n\tf()\n\t// Output:\n\t// 2\n}",
            False,
        ),
        ("//go:embed a.txt\nvar a string", "//go:embed b.txt\nvar a string", False),
        ('// int f();\nimport "C"', '// long f();\nimport "C"', False),
    ],
)
def test_form_and_comments_of_a_source_mean_nothing(one: str, other: str, same: bool) -> None:
    meanings = [GO.meaning(f"package p\n\n{text}\n".encode()) for text in (one, other)]
    assert None not in meanings
    assert (meanings[0] == meanings[1]) is same


def test_a_source_that_does_not_parse_has_neither_meaning_nor_names() -> None:
    assert GO.meaning(b"package p\nfunc {") is None
    assert GO.names(b"package p\nfunc {") == frozenset()


def test_names_are_those_of_functions_types_fields_and_variables() -> None:
    source = b"package p\n\ntype T struct{ Field int }\n\nfunc (t T) Method(arg int) { q.Call(arg) }\n"
    assert GO.names(source) >= {"p", "T", "Field", "Method", "arg", "t", "q", "Call"}


def test_declarations_are_those_at_the_top_of_a_file_without_bodies_and_values() -> None:
    source = b"""package price

type Price struct {
	Cents, Percent int
}

type Option func(*Price)

const Most, least = 9, 1

func (p *Price) Sum(
	more ...Option,
) (int, error) {
	local := 1
	return local, nil
}
"""
    assert [(one.name, one.text, one.owner) for one in GO.declarations(source)] == [
        ("Price", "type `Price`", ""),
        ("Cents", "field `Cents` (`int`)", "Price"),
        ("Percent", "field `Percent` (`int`)", "Price"),
        ("Option", "`type Option func(*Price)`", ""),
        ("Most", "`Most`", ""),
        ("least", "`least`", ""),
        ("Sum", "`func (p *Price) Sum( more ...Option, ) (int, error)`", "Price"),
    ]
    assert list(GO.declarations(b"package (")) == []


def test_an_eval_script_runs_the_packages_of_its_modules_and_leaves_out_whole_functions() -> None:
    begin = "#!/bin/bash\ncd /workspace || exit 1\ngo test -vet=off -count=1 "
    modules = ["a/b/one_test.go", "a/b/two_test.go", "top_test.go"]
    assert GO.eval_script(modules) == f"{begin}. ./a/b\n"
    script = GO.eval_script(
        modules, ["TestBad/case_1"], ["TestBad", "TestBad/case_2", "TestGood", "x.TestFine"]
    )
    assert script == f"{begin}'-run=^(TestFine|TestGood)$' . ./a/b\n"
    with pytest.raises(Fallen, match="all its test functions have a test that"):
        GO.eval_script(modules, ["TestBad/case_1"], ["TestBad", "TestBad/case_2"])


@pytest.mark.parametrize(
    ("mod", "more", "why"),
    [
        (None, {}, "has no go.mod"),
        (f"{MOD}require a.example/b v1.0.0 // indirect\n", {}, "needs other modules: a.example/b, and has"),
        (f"{MOD}require (\n\ta.example/b v1.0.0\n)\n", {}, "needs other modules: a.example/b, and has"),
        (f"{MOD}require a.example/b v1.0.0\n", {"vendor/modules.txt": "# a.example/b v1.0.0\n"}, ""),
        (f"{MOD}// require a.example/b v1.0.0\n", {}, ""),
        (f"{MOD}\nrequire ()\n", {}, ""),
        (f"{MOD}require a.example/b v1.0.0\nreplace a.example/b => ./b\n", {}, ""),
        (f"{MOD}require a.example/b v1.0.0\nreplace (\n\ta.example/b v1.0.0 => ../b\n)\n", {}, ""),
        (
            f"{MOD}require a.example/b v1.0.0\nreplace a.example/b => a.example/c v1.0.0\n",
            {},
            "needs other modules: a.example/b, and has",
        ),
    ],
)
def test_a_module_must_have_what_it_requires(
    tmp_path: Path, mod: str | None, more: dict[str, str], why: str
) -> None:
    repository = Repository.at(tmp_path / "price")
    sha = repository.commit("Begin", {"price.go": PRICE, **({"go.mod": mod} if mod else {}), **more})
    history = History(repository.path, tmp_path / "borrowed.git")
    if not why:
        GO.declared(history, sha, ())
        return
    with pytest.raises(Fallen) as fallen:
        GO.declared(history, sha, ())
    assert str(fallen.value).startswith(why)


@pytest.mark.parametrize(
    ("metadata", "found", "is_refused"),
    [
        ("go 1.18", "go1.19.8", False),
        ("go 1.21", "go1.19.8", False),
        ("go 1.21.0", "go1.19.8", True),
        ("go 1.21\ntoolchain go1.22.1", "go1.19.8", True),
        ("go 1.23", "go1.24.4", False),
        ("go 1.25", "go1.24.4", True),
        ("go 1.24.5 // the newest", "go1.24.4", True),
        ("", "go1.24.4", False),
    ],
)
def test_a_module_for_a_newer_go_is_refused_before_anything_is_built(
    tmp_path: Path, metadata: str, found: str, is_refused: bool
) -> None:
    repository = Repository.at(tmp_path / "price")
    sha = repository.commit("Begin", {"go.mod": f"module m\n\n{metadata}\n", "price.go": PRICE})
    needs = GO.declared(History(repository.path, tmp_path / "borrowed.git"), sha, ())
    base = BaseEnvironment("base", "", {"version": found})
    if is_refused:
        with pytest.raises(Fallen, match="needs a newer go than the base image has"):
            GO.fetch(needs, base, "", tmp_path)
    else:
        GO.fetch(needs, base, "", tmp_path)


@pytest.mark.parametrize(("version", "is_told"), [("go 1.13", True), ("", True), ("go 1.14", False)])
def test_go_is_told_to_use_the_vendored_modules_where_it_would_not(
    tmp_path: Path, version: str, is_told: bool
) -> None:
    repository = Repository.at(tmp_path / "price")
    mod = f"module m\n\n{version}\n\nrequire a.example/b v1.0.0\n"
    sha = repository.commit("Begin", {"go.mod": mod, "vendor/modules.txt": "# a.example/b v1.0.0\n"})
    needs = GO.declared(History(repository.path, tmp_path / "borrowed.git"), sha, ())
    assert GO.install(needs).startswith("ENV GOFLAGS=-mod=vendor\n") is is_told


@pytest.mark.parametrize(
    ("path", "is_module"),
    [
        ("a/b_test.go", True),
        ("testdata/src/a/a_test.go", False),
        ("_old/a_test.go", False),
        ("a/.b/a_test.go", False),
        ("vendor/a/a_test.go", False),
    ],
)
def test_what_go_leaves_out_of_a_module_holds_no_tests_of_it(path: str, is_module: bool) -> None:
    assert GO.is_module(path) is is_module


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_history_in_go_becomes_verified_tasks_without_the_tests_that_fail(
    tmp_path: Path, repository: Repository
) -> None:
    ensure_image(IMAGES["task-go"])
    repository.commit("Begin", {"go.mod": MOD, "price.go": PRICE, "price_test.go": TESTS})
    fix = repository.commit(
        "Half cents are lost in discounts, and they have to be rounded up",
        {"price.go": MENDED, "price_test.go": TESTS + HALVES},
    )
    repository.commit(
        "Say what cents are in the comment of the discount",
        {
            "price.go": MENDED.replace("in cents", "in whole cents"),
            "price_test.go": TESTS + HALVES + "// end\n",
        },
    )
    out = tmp_path / "tasks"
    finished(
        [
            "from-git",
            str(repository.path),
            "--language",
            "go",
            "--out",
            str(out),
            "--repeat",
            "2",
            "--jobs",
            "1",
        ]
    )
    found = {one.sha: one for one in candidates(out)}
    assert [one.reason for one in found.values() if one.sha != fix] == [
        "moves or formats code only",
        "has no parent",
    ]
    assert found[fix].outcome == "kept"
    assert found[fix].deselected == ("example.com/price.TestHome",)
    (task,) = read_tasks(out / "train.jsonl")
    (verified,) = read_verified(verified_path(out / "train.jsonl")).values()
    assert (verified.control, verified.num_tests, verified.num_needing_fix) == ("confirmed", 2, 1)
    gold = read_gold(out / "train.gold.jsonl")[task.id]
    assert "price_test.go" not in gold.patch
    assert "(cents*percent+50)" in gold.patch
