"""OpenAI's formats of requests and responses, for the server and for batch files."""
