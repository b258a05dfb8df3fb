"""Decoding: its parameters, sampling, and loops that each compile into one device program for a whole generation."""
