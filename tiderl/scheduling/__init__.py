"""Pure decisions: no I/O, no clock, no torch, nothing of ours but itself."""
