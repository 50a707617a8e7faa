"""What can go wrong with an image, in words for people."""


class ImageError(Exception):
    """`transient`: asking again later may help. The text is one line."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.transient = transient


class ImageInUse(ImageError):
    """A container, running or not, stands on it."""


class Stopped(ImageError):
    """The caller wanted no more of it."""
