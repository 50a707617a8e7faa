"""Docker hosts: where they are, the client that speaks to them, and the translation of its errors."""
