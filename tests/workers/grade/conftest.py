from tests.workers.verify.conftest import file, image

__all__ = ["file", "image"]
