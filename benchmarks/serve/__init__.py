"""The server, beside an older one and beside a loop over ``engine.generate``."""
