"""Metrics, decision log, timeline trace."""
