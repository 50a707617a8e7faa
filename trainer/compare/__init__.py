"""Comparison of recipes: which of two is better, and how much it takes to tell."""
