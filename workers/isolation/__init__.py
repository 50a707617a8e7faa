"""Functions that read what a policy or a patch wrote run in processes of their own, with limits: no input holds the worker."""
