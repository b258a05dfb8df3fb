"""The life of a command's process: start-up, exit codes, devices, progress, profiling, interruption."""
