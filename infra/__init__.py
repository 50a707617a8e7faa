"""What Swerve stands on: services, images, serving processes. It is run, never imported by the other
packages.
"""

import contextlib

# The images of an engine and of a router hold `infra/serving` without `pipeline`, and have what they need.
with contextlib.suppress(ModuleNotFoundError):
    from pipeline.dependencies import name_missing_packages

    name_missing_packages()
