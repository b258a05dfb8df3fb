"""The server: what comes in over HTTP, who gets which slot of the mesh when, and what goes out."""
