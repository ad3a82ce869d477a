"""Episodes driven against hub and engine."""
