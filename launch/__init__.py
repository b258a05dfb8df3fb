"""Commands: the only package with flags, environment variables, printing and process start-up."""
