"""What gives the answer away in an agent's container: finding it, and cleaning it out of the image."""
