"""Run several hosts as one: find them, check that they agree, and end the run on all when one of them fails.

Each host has two processes. The *worker* runs the command and is the process that JAX knows. Its parent, the
*supervisor*, holds no device: it is connected to host 0's supervisor, reports what happens to its worker, and exits
with the code that all hosts share. The supervisor exists for three reasons. JAX ends a broken run with SIGABRT, after
which no Python code runs. A frozen process cannot report its own state. And JAX's coordination service accepts no
message before all hosts have joined, so it cannot name the host that is missing.
"""
