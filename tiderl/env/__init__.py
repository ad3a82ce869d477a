"""What an environment is."""
