"""Built-in sandboxes, found through entry points."""
