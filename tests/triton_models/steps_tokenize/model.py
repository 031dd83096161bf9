"""The first step of the ensemble `steps`: a text as its bytes, 16 added.

Hexadecimal digits in front, in capitals, are special ids.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy().flatten()[0]
            plain = text.lstrip(b"0123456789ABCDEF")
            ids = [int(digit, 16) for digit in text[: len(text) - len(plain)].decode()] + [byte + 16 for byte in plain]
            tensors = [
                pb_utils.Tensor("INPUT_ID", np.array([ids], dtype=np.int32)),
                pb_utils.Tensor("REQUEST_INPUT_LEN", np.array([[len(ids)]], dtype=np.int32)),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
