"""Rows on the devices: buckets, compiled programs, memory, slots and the scheduler."""
