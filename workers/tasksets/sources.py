"""The sources of tasks, by their names on the command line and in task ids."""

from workers.tasksets import (
    fleet,
    harbor,
    multi_swe_bench,
    r2e_gym,
    swe_bench,
    swe_bench_pro,
    swe_gym,
    swe_rebench,
    swe_smith,
)
from workers.tasksets.importing import Importer

SOURCES: dict[str, Importer] = {
    "fleet": fleet.IMPORTER,
    "swe-bench": swe_bench.IMPORTER,
    "swe-gym": swe_gym.IMPORTER,
    "r2e-gym": r2e_gym.IMPORTER,
    "swe-smith": swe_smith.IMPORTER,
    "swe-bench-pro": swe_bench_pro.IMPORTER,
    "swe-rebench": swe_rebench.IMPORTER,
    "multi-swe-bench": multi_swe_bench.IMPORTER,
    "harbor": harbor.IMPORTER,
}
