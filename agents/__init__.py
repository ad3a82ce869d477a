"""Built-in agents and action formats, found through entry points."""
