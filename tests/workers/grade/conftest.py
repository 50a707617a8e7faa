from tests.workers.verify.conftest import file, image
from tests.workers.verify.test_published import swe_bench_rows

__all__ = ["file", "image", "swe_bench_rows"]
