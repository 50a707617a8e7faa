"""Whole stories: several real processes, and something goes wrong in the middle."""
