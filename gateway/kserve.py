"""What both KServe fronts, gRPC and HTTP, have in common."""

API = "kserve"
"""The fronts' name in metrics."""

BODY_LIMIT = 2**31 - 1
"""Bytes of a message or of an HTTP body: Triton counts them in an int32."""

EXTENSIONS = (
    *("classification", "sequence", "schedule_policy", "model_configuration"),
    *("binary_tensor_data", "parameters", "statistics"),
)
"""Those of Triton's extensions that its clients can use through the gateway."""
