"""What crosses the cut, and the two sides of it."""
