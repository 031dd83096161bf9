"""A decoupled Python-backend model that no language model's contract fits: it counts.

It answers with `COUNT` numbers, each `SECONDS` after the one before; with `FAIL_FIRST`, an error comes before them.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = {tensor.name(): tensor.as_numpy().item() for tensor in request.inputs()}
            arguments = (values, request.get_response_sender())
            threading.Thread(target=self.count, args=arguments, daemon=True).start()

    def count(self, values, sender):
        if values.get("FAIL_FIRST"):
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not yet")))
        for number in range(values["COUNT"]):
            # Cancels are not asked for: a process that is killed while it asks takes Triton along.
            time.sleep(values["SECONDS"])
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TICK", np.array([number], dtype=np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
