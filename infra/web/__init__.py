"""Runs in a browser: pages, the JSON that they are drawn from, and nothing that changes anything."""
