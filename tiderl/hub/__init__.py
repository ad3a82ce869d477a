"""Environments over ZeroMQ."""
