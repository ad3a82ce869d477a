"""Runs policies, journals results, reports."""
