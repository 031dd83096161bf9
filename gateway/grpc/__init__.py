"""The gRPC front: KServe v2, as Triton speaks it."""
