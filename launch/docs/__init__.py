"""Documents for users, and the commands that generate their tables from the code."""
