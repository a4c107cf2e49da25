"""Logs, metrics and traces of both roles."""
