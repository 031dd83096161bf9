"""Moving an answer from the engine to the client: framing and whole events."""
