"""The CPU fleet: each request becomes one trajectory."""

from pipeline.commandline import name_missing_packages

name_missing_packages()
