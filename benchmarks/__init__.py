"""How fast, as ratios to named rivals and floors measured in the same run. Nothing imports this."""

from pipeline.dependencies import name_missing_packages

name_missing_packages()
