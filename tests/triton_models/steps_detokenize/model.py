"""The last step of the ensemble `steps`: the bytes of a message's ids."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy().flatten()
            length = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy().flatten()[0]
            text = bytes(int(token) - 16 for token in ids[:length] if token >= 16)
            tensor = pb_utils.Tensor("OUTPUT", np.array([[text]], dtype=np.object_))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
