"""The whole system on one machine: `python -m infra.local`, which is what `make demo` runs."""
