"""Logs, metrics and traces: how both roles tell what they do."""
