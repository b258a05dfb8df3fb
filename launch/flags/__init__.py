"""Flags that several commands share, and what is made of them: a checkpoint, an engine, a decoding configuration."""
