"""The data plane: client connections, dispatch, the byte relay and the engine adapters."""
