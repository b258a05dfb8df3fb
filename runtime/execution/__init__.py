"""Execution of rows on the devices: slots, buckets, compiled programs, memory, the scheduler, and scoring."""
