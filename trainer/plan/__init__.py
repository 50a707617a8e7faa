"""Whether a run fits its hardware and how fast it will be, computed before anything is started."""
