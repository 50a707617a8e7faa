"""Small pretrained policies for one machine, from packages that carry their weights."""
