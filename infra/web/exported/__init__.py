"""Pages of one run in a single file that opens without a server: `python -m infra.web --export DIR`."""
