collect_ignore = ["fixtures"]  # repositories with tests of their own are among them
