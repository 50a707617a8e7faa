"""How fast, as ratios to named rivals and floors measured in the same run. Only tests import it."""

from pipeline.commandline import name_missing_packages

name_missing_packages()
