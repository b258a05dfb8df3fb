"""Flags that several commands share, and the checkpoint, engine and decoding configuration made from them."""
