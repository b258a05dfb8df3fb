"""Several hosts as one run: who is here, whether all agree, and how a fault on one ends the run on all, by name.

Each host has two processes. The *worker* runs the launcher and is what JAX knows. The *supervisor*, its parent, holds
no device: it is connected to host 0's supervisor, tells what becomes of its worker, and ends with the exit code that
all hosts share. It exists because JAX's own end of a broken run is SIGABRT, in which no Python code runs any more;
because a frozen process can say nothing of itself; and because JAX's coordination service takes no message before all
hosts have joined it, which is when a missing host must be named.
"""
