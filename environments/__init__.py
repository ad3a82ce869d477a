"""Built-in environments: the first plug-ins, found like a user's own."""
