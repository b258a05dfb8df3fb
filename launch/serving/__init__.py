"""The HTTP server: routes and validation, the engine's thread, responses and streams. See README.md."""
