r"""What a judge's reply says: the last \boxed{...} of it is the vote.

Only +1 (or 1) and -1 are votes; anything else in the last box, or no box, abstains. Boxes in a thought do not count, so the caller takes
thoughts out first. The text comes from a model that has read what the policy wrote, so reading it is linear in its length.
"""

from typing import Final

BOX: Final = "\\boxed"
VALUES: Final = {"+1": 1.0, "1": 1.0, "-1": -1.0}


def vote_value(content: str) -> float | None:
    """The vote in a reply without its thought; None: it abstains."""
    _, box, rest = content.rpartition(BOX)
    rest = rest.lstrip()
    inside, closed, _ = rest.removeprefix("{").partition("}")
    if not box or not rest.startswith("{") or not closed:
        return None
    return VALUES.get(inside.strip())
