"""Engine adapters: one for each engine protocol, all behind `gateway.upstream.base`."""
