#!/bin/bash
set -e
cd /workspace
python3 -m pytest tests/test_pricing.py
