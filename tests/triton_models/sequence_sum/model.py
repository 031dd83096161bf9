"""A Python-backend model that answers each request of a sequence with the sum of the sequence's values so far.

The sum is in the memory of one instance, to which Triton sends all of a sequence: a request that reached another server
would be answered with another sum, or refused for a sequence that was never started.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.total = 0

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        value, start = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()) for name in ("VALUE", "START")
        )
        self.total = value if start else self.total + value
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.array([[self.total]], dtype=np.int32))])
