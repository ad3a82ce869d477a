"""Packages of the one distribution; everything else is in pyproject.toml.

The outer folders install as `tiderl.<folder>`: a top-level `agents` package in site-packages would collide
with other wheels.
"""

from setuptools import find_packages, setup

OUTER = ("agents", "configs", "environments", "sandboxes")

setup(
    packages=[
        *find_packages(include=["tiderl", "tiderl.*"]),
        *(f"tiderl.{name}" for name in find_packages(include=[p for o in OUTER for p in (o, f"{o}.*")])),
    ],
    package_dir={f"tiderl.{name}": name for name in OUTER},
)
