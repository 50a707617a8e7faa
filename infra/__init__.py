"""The infrastructure that Swerve runs on: services, images, serving processes. It is run, never imported by the other
packages.
"""

import contextlib

# The images of an engine and of a router hold `infra/serving` without `pipeline`, which they do not need.
with contextlib.suppress(ModuleNotFoundError):
    from pipeline.commandline import name_missing_packages

    name_missing_packages()
