"""When a trajectory passed each stage of the trainer: part of its episode row."""

import msgspec


class EpisodeStamps(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds on the trainer's clock, but for `published_at`, which is Redis's; 0.0: it did not come so far, or the journal is
    older than these fields.
    """

    published_at: float = 0.0  # its entry was put on the stream
    read_at: float = 0.0  # the trainer read the entry; again after a resume
    joined_at: float = 0.0  # its samples were made, and it joined its group or its evaluation
    closed_at: float = 0.0  # its group closed, for whatever reason
    # Its group waited for no judgement any more; 0.0 also where a step took the group before that.
    released_at: float = 0.0


NO_STAMPS = EpisodeStamps()
"""Of what passed no stage."""
