"""Base images made from Debian packages, so that no container registry is needed."""
