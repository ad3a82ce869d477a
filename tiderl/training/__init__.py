"""Advantages, losses, packing, the torch replica, reference, checkpoints."""
