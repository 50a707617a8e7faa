"""Leaks: finding what reveals the answer in an agent's container, and removing it from the image."""
