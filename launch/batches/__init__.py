"""Batches of prompts: their lines, what is written of them, and the folder that survives the run."""
