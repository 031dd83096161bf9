"""A Python-backend model that answers each input with an output of the same values, one pair for every datatype."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.echo(request) for request in requests]

    def echo(self, request):
        asked = request.requested_output_names()
        outputs = []
        for tensor in request.inputs():
            name = tensor.name().replace("_IN", "_OUT")
            if name in asked:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
