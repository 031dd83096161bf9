"""A Python-backend model that answers each request once, after the seconds it asks for, unless it is cancelled.

Cancellations are counted in the metric `scripted_cancelled_total`.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="scripted_cancelled_total", description="Cancelled requests", kind=pb_utils.MetricFamily.COUNTER
        )
        self.cancelled = self.family.Metric(labels={"model": args["model_name"]})

    def execute(self, requests):
        return [self.sleep(request) for request in requests]

    def sleep(self, request):
        seconds = float(pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy().item())
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if request.is_cancelled():
                self.cancelled.increment(1)
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                )
            time.sleep(0.02)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SLEPT", np.array([seconds], dtype=np.float32))])
