"""The languages of repositories from which tasks are made, each in a module."""
