"""The CPU fleet: one request in, one trajectory out."""

from pipeline.dependencies import name_missing_packages

name_missing_packages()
