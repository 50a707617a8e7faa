"""The vocabulary of the task family: which words name things, and which names belong to which split.

A function is called ``verb_noun``. A hash of the whole name decides its split, so the warm start, training and the held-out
set never share a name. They share the words.
"""

import hashlib
import random
from typing import Literal

Split = Literal["warmstart", "train", "heldout"]

DIRECTORIES = ("src", "lib", "app", "core", "pkg", "base")
VERBS = (
    "make", "load", "scale", "count", "merge", "check", "apply", "build", "split", "clamp", "shift",
    "blend", "score", "rank", "price", "grade", "weigh", "trim", "pack", "group", "parse", "fetch",
    "round", "sort", "match", "audit", "plan", "route", "send", "spend",
)  # fmt: skip
NOUNS = (
    "tax", "order", "cart", "user", "stock", "bonus", "angle", "batch", "queue", "page", "tank", "seat",
    "fuel", "wage", "loan", "bill", "team", "slot", "grid", "cell", "node", "task", "item", "card",
    "coin", "ticket", "city", "road", "lamp", "wheel", "train", "plane", "piece", "color", "sound",
    "cloud", "river", "field", "tower", "bridge", "garden", "market", "letter", "number", "window",
    "sheet", "table", "paper", "frame", "panel",
)  # fmt: skip
LOCALS = (
    "rate", "fee", "limit", "total", "width", "depth", "level", "share", "extra", "step", "first",
    "second", "left", "right", "low", "high", "old", "new", "size", "gap", "mark", "cost", "gain",
    "weight", "speed", "budget", "target", "start", "part", "value",
)  # fmt: skip
_HASH_RANGES: dict[Split, range] = {"warmstart": range(5), "train": range(5, 7), "heldout": range(7, 10)}


def split_of(name: str) -> Split:
    """The split that owns a function name, by hash."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
    return next(split for split, buckets in _HASH_RANGES.items() if bucket in buckets)


def function_name(rng: random.Random, split: Split) -> str:
    """A random function name that belongs to `split`."""
    while True:
        name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
        if split_of(name) == split:
            return name


def module_name(rng: random.Random) -> str:
    """A random module name."""
    return rng.choice(NOUNS)
