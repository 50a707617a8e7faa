"""The journal of a run: its rows, file names and readers. The trainer writes it, and every command and page reads it."""
