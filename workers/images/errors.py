"""What can go wrong with an image, in words for people."""


class ImageError(Exception):
    """`transient`: trying again later may help. The text is one line."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.transient = transient


class NoSuchImage(ImageError):
    """Nothing has this name, on the Docker host or in the registry."""


class ImageInUse(ImageError):
    """A container, running or not, was made of it."""


class PullStopped(ImageError):
    """The caller stopped the pull."""
