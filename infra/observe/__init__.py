"""Prometheus, Grafana and Tempo for a fleet: what they are configured with, and what makes the dashboards."""
