"""The client-facing HTTP server and the OpenAI API on it."""
