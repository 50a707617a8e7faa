"""`python -m workers.play`: one episode by hand, without queue and trainer."""
