"""Certifies SGLang engines and their router before a run: `python -m infra.serving.check`."""
