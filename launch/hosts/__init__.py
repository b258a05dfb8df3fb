"""Run several hosts as one: find them, check that they agree, and end the run on all when one of them fails.

Each host has two processes. The *worker* runs the command and is the process that JAX knows. Its parent, the
*supervisor*, holds no device: it is connected to host 0's supervisor, reports what happens to its worker, and exits
with the code that all hosts share. The supervisor exists for three reasons. JAX ends a broken run with SIGABRT, after
which no Python code runs. A frozen process cannot report its own state. And JAX's coordination service accepts no
message before all hosts have joined, so it cannot name the host that is missing.

All supervisors are connected to the control server on host 0 (:mod:`launch.hosts.control`). It has two parts: the fault
hub (:mod:`launch.hosts.hub`) finds the cause of a fault, and :mod:`launch.hosts.exchanges` holds the values that hosts
exchange without devices, mostly before the run. The steps of a server travel between the devices
(:mod:`launch.serving.turns`).
"""
