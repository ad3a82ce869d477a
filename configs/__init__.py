"""Named configurations that ship with the package (YAML files beside this one)."""
