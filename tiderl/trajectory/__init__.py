"""The token record, groups, the ready buffer, episode files."""
