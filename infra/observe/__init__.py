"""Prometheus, Grafana and Tempo for a fleet: their configuration, and the program that makes the dashboards."""
