"""Computes whether a run fits its hardware and how fast it will be, before anything is started."""
