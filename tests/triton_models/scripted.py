"""A Python-backend model that answers what its prompt tells it to, in the tensor signature its config declares.

The prompt is a JSON object (any other prompt is answered with itself):

- `text`: what to answer; or `inputs: true`: answer with the inputs received, as JSON
- `cut`: bytes per message (all in one message without it); each message counts as one token
- `first_delay`, `delay`: seconds before the first message, and between messages; an answer in one message takes as long
- `in_turn`: not before other requests that have this have ended (decoupled models; others have Triton's queue)
- `fail`: an error message to end with, after `fail_after` messages (0) and a `delay` more; `invalid`: as the request's
  fault
- `die`: end the model's process after that many messages
- `prompt_tokens`, `reused_blocks`: what to report
- `finish`: finish reason to report (LLM-API signature)
- `deaf`: ask for cancels between messages only, not all the time: a process killed while it asks takes Triton along
- `ignore_stop`: go on after a stop string; without it the text ends after the first one, which stays in it
- `revise`: in a cumulative signature, change text that was sent before

Requests and cancellations are counted as `phases` says.
"""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from phases import POLL_S, Requests, after

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.batched = config["max_batch_size"] > 0
        self.inputs = {tensor["name"] for tensor in config["input"]}
        self.outputs = {tensor["name"] for tensor in config["output"]}
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.llmapi = "sampling_param_max_tokens" in self.inputs
        accumulate = config.get("parameters", {}).get("accumulate_tokens", {}).get("string_value", "")
        self.cumulative = self.llmapi or accumulate == "true"
        self.requests = Requests(args["model_name"], "cancelled")
        blocks = pb_utils.MetricFamily(
            name="nv_trt_llm_kv_cache_block_metrics", description="KV blocks", kind=pb_utils.MetricFamily.GAUGE
        )
        self.blocks = blocks.Metric(labels={"kv_cache_block_type": "tokens_per", "model": args["model_name"]})
        self.blocks.set(32)
        self.block_family = blocks

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                sender = request.get_response_sender()
                arguments = (self.read(request), sender)
                threading.Thread(target=self.stream, args=arguments, daemon=True).start()
            return None
        return [self.answer_once(self.read(request), request) for request in requests]

    def read(self, request):
        values = {}
        for name in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                continue
            array = tensor.as_numpy()
            assert array.ndim == (2 if self.batched else 1), f"{name} has shape {array.shape}"
            items = [item.decode() if isinstance(item, bytes) else item.item() for item in array.flatten()]
            values[name] = items if "stop" in name else items[0]
        prompt = values.get("text_input", "")
        try:
            script = json.loads(prompt)
            assert isinstance(script, dict)
        except (ValueError, AssertionError):
            script = {"text": prompt}
        script["asked"] = sorted(request.requested_output_names())
        script["id"] = request.request_id()
        return script, values

    def pieces(self, script, values):
        if script.get("inputs"):
            text = json.dumps({**values, "asked": script["asked"], "id": script["id"]})
        else:
            text = script.get("text", "")
        stops = values.get("stop_words") or values.get("sampling_param_stop") or []
        if not script.get("ignore_stop"):
            ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
            text = text[: min(ends)] if ends else text
        content = text.encode()
        cut = script.get("cut") or max(len(content), 1)
        limit = values.get("max_tokens", values.get("sampling_param_max_tokens"))
        return [content[at : at + cut] for at in range(0, len(content), cut)][:limit]

    def response(self, script, text, tokens, last=False):
        shape = (1, 1) if self.batched else (1,)
        prompt_tokens = script.get("prompt_tokens", 7)
        values = {
            "text_output": np.array([text], dtype=np.object_),
            "num_input_tokens": np.array([prompt_tokens], dtype=np.int32),
            "num_output_tokens": np.array([tokens], dtype=np.int32),
            "kv_cache_reused_block": np.array([str(script.get("reused_blocks", 0))], dtype=np.object_),
            "kv_cache_reused_blocks": np.array([script.get("reused_blocks", 0)], dtype=np.int32),
            "total_draft_tokens": np.array([10], dtype=np.int32),
            "total_accepted_draft_tokens": np.array([7], dtype=np.int32),
            "finish_reason": np.array([script.get("finish", "stop") if last else "None"], dtype=np.object_),
        }
        tensors = [
            pb_utils.Tensor(name, values[name].reshape(shape))
            for name in sorted(self.outputs & values.keys() & set(script["asked"]))
        ]
        return pb_utils.InferenceResponse(tensors)

    def error(self, message, invalid=False):
        code = pb_utils.TritonError.INVALID_ARG if invalid else pb_utils.TritonError.INTERNAL
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))

    def answer_once(self, job, request):
        script, values = job
        with self.requests.new() as progress:
            if not self.wait(request, after(script.get("first_delay", 0)), script.get("deaf")):
                return self.cancelled()
            if "fail" in script:
                return self.error(script["fail"], script.get("invalid", False))
            progress.decodes()
            pieces = self.pieces(script, values)
            if not self.wait(request, after(script.get("delay", 0) * (len(pieces) - 1)), script.get("deaf")):
                return self.cancelled()
            return self.response(script, b"".join(pieces), len(pieces), last=True)

    def stream(self, job, sender):
        script, values = job
        with self.requests.new(script.get("in_turn")) as progress:
            if not self.send(script, values, sender, progress):
                sender.send(self.cancelled(), flags=FINAL)

    def send(self, script, values, sender, progress):
        """Answer with messages; whether the request was not cancelled meanwhile."""
        deaf, delay = script.get("deaf"), script.get("delay", 0)
        if not (self.wait(sender, progress.its_turn) and self.wait(sender, after(script.get("first_delay", 0)), deaf)):
            return False
        pieces = self.pieces(script, values)
        progress.decodes()
        if not values.get("stream", values.get("streaming")):
            if not self.wait(sender, after(delay * (len(pieces) - 1)), deaf):
                return False
            pieces = [b"".join(pieces)]
        sent = b""
        for index, piece in enumerate([*pieces, None]):
            if "fail" in script and index == script.get("fail_after", 0):
                if index and not self.wait(sender, after(delay), deaf):
                    return False
                sender.send(self.error(script["fail"], script.get("invalid", False)), flags=FINAL)
                return True
            if "die" in script and index == script["die"]:
                # A process that dies holding a lock in memory shared with Triton takes Triton along: let it get idle.
                time.sleep(0.5)
                os._exit(1)
            if piece is None:
                break
            if index and not self.wait(sender, after(delay), deaf):
                return False
            sent += piece
            text = sent.decode("utf-8", "replace").encode() if self.cumulative else piece
            if script.get("revise") and index == 1:
                text = text[::-1]
            sender.send(self.response(script, text, 1, last=index == len(pieces) - 1))
        sender.send(flags=FINAL)
        return True

    def cancelled(self):
        self.requests.count("cancelled")
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
        )

    def wait(self, request, over, deaf=False):
        """Wait until `over()`; whether the request, or its sender, was not cancelled meanwhile."""
        while True:
            ends = over()
            if (ends or not deaf) and request.is_cancelled():
                return False
            if ends:
                return True
            time.sleep(POLL_S)
