"""Measure passes on a GPU beside the times that ``benchmarks.schedule`` models."""
