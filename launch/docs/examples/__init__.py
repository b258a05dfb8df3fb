"""Example programs. Each is run by a test with the demo checkpoint."""
