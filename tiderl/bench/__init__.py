"""Benchmarks against other systems; the commands are in `tiderl.cli.bench`."""
