"""Moving an answer from the engine to the client: framing, whole events, the client's side of the connection."""
