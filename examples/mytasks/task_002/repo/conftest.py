"""Here so that tests can import the modules of this directory."""
