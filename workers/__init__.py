"""The CPU fleet: one request in, one trajectory out."""
