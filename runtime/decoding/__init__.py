"""Decoding loops, each compiled into one device program that runs a whole generation."""
