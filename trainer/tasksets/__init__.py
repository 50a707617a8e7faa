"""Tasks from where they are published, as records that a run can read."""
