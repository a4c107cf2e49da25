"""Traces: W3C trace headers are passed on in any case, spans exported where that is asked for."""
