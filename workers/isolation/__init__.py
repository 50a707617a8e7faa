"""Functions that read text from a policy or a patch run in processes of their own, with limits: no input can block the worker."""
