"""Runs: one batch of rows on the mesh, from put to fetch, for each way of decoding."""
