"""Benchmark of the server against an older version of it and a loop over ``engine.generate``."""
