"""OpenAI's forms of requests and answers: read and written here, for files of them and for the server."""
