"""The base of every row of the journal."""

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of everything in the journal.

    New fields go at the end, with a default, so that old runs stay readable.
    """
