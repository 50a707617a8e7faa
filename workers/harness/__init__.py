"""Agent programs for episodes:

`swerve harness`, and the volumes that provide them to containers. pipeline/harness.py defines the format.
"""

from pipeline.commandline import name_missing_packages

name_missing_packages()
