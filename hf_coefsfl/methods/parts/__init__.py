"""What methods share, and the larger parts of single methods."""
