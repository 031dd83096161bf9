"""A Python-backend model with the signature of TensorRT-LLM's engine: it answers with the ids of its prompt.

The first 16 ids of the tests' tokenizer are special. Those in the prompt say how to answer and are not repeated:

- 3, 4, 5: 1, 2 or 7 ids per message (all in one message without one)
- 6: a second before the first message; 7: a minute; 8: 50 ms between messages
- 9: answer with the inputs received, as JSON, one id per byte
- 10: log probabilities of a message repeat all since the beginning
- 11: go on after stop words, and no end
- 12: not before other requests that have this have ended

An answer in one message takes as long as one in many.

Id 2 is repeated: it is a model's end of turn. An answer ends with `end_id` if it is given and the answer is shorter
than `request_output_len`. A request with `stop` ends the running one with its id. That, cancellations and requests are
counted as `phases` says. `output_ids` are padded with -1, as the engine's are.
"""

import itertools
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from phases import POLL_S, Requests, after

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SPECIALS = 16
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


def byte_ids():
    """The id of each byte: a byte-level vocabulary begins with its alphabet, sorted by letter."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    letters = {**{byte: byte for byte in PRINTABLE}, **{byte: 256 + at for at, byte in enumerate(others)}}
    ordered = sorted(range(256), key=letters.__getitem__)
    return {byte: SPECIALS + at for at, byte in enumerate(ordered)}


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.shapes = {tensor["name"]: len(tensor["dims"]) + 1 for tensor in config["input"]}
        self.outputs = {tensor["name"] for tensor in config["output"]}
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.running = {}
        self.byte_ids = byte_ids()
        self.requests = Requests(args["model_name"], "cancelled", "stopped")

    def execute(self, requests):
        for request in requests:
            values = self.read(request)
            asked = set(request.requested_output_names())
            assert {"output_ids", "sequence_length"} <= asked, "the engine must be asked for its ids"
            sender = request.get_response_sender()
            if values.get("stop") == [True]:
                self.stop(request.request_id(), sender)
            else:
                job = (request.request_id(), values, asked, sender)
                threading.Thread(target=self.answer, args=job, daemon=True).start()

    def read(self, request):
        values = {}
        for name, rank in self.shapes.items():
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                array = tensor.as_numpy()
                assert array.ndim == rank, f"{name} has shape {array.shape}"
                values[name] = [item.decode() if isinstance(item, bytes) else item for item in array[0].tolist()]
        return values

    def stop(self, id_, sender):
        stopped = self.running.get(id_)
        if stopped is not None:
            self.requests.count("stopped")
            stopped.set()
        self.end(sender)

    def end(self, sender):
        if self.decoupled:
            sender.send(flags=FINAL)
        else:
            sender.send(pb_utils.InferenceResponse([]), flags=FINAL)

    def ids(self, id_, values, asked):
        prompt = values["input_ids"]
        assert values["input_lengths"] == [len(prompt)]
        if 9 in prompt:
            return [self.byte_ids[byte] for byte in json.dumps({**values, "id": id_, "asked": sorted(asked)}).encode()]
        ids = [token for token in prompt if token == 2 or token >= SPECIALS]
        if 11 not in prompt:
            ids = self.until_stop(ids, values.get("stop_words_list")) + values.get("end_id", [])
        return ids

    def until_stop(self, ids, words):
        starts = [0] + [end for end in (words[1] if words else []) if end >= 0]
        sequences = [words[0][a:b] for a, b in itertools.pairwise(starts)]
        for at in range(len(ids) + 1):
            if any(ids[max(at - len(word), 0) : at] == word for word in sequences):
                return ids[:at]
        return ids

    def response(self, prompt, asked, ids, before):
        repeated = 10 in prompt
        logs = [-(token % 8) / 4 for token in (before + ids if repeated else ids)]
        values = {
            "output_ids": np.array([[ids + [-1] * 3]], dtype=np.int32),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
            "output_log_probs": np.array([[logs]], dtype=np.float32),
            "kv_cache_reused_blocks": np.array([[1]], dtype=np.int32),
            "total_draft_tokens": np.array([[10]], dtype=np.int32),
            "total_accepted_draft_tokens": np.array([[7]], dtype=np.int32),
        }
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, values[name]) for name in sorted(self.outputs & asked & values.keys())]
        )

    def answer(self, id_, values, asked, sender):
        stopped = self.running[id_] = threading.Event()
        try:
            with self.requests.new(12 in values["input_ids"]) as progress:
                self.send(id_, values, asked, sender, stopped, progress)
        finally:
            del self.running[id_]

    def send(self, id_, values, asked, sender, stopped, progress):
        prompt = values["input_ids"]
        cut = next((size for token, size in ((3, 1), (4, 2), (5, 7)) if token in prompt), 10**9)
        delay = 0.05 if 8 in prompt else 0
        prefill = 60 if 7 in prompt else 1 if 6 in prompt else 0
        if not (self.wait(sender, stopped, progress.its_turn) and self.wait(sender, stopped, after(prefill))):
            return
        ids = self.ids(id_, values, asked)[: values["request_output_len"][0]]
        progress.decodes()
        if values.get("streaming") != [True] or not self.decoupled:
            if not self.wait(sender, stopped, after(delay * ((len(ids) - 1) // cut))):
                return
            cut = 10**9
        if not self.decoupled:
            if values.get("exclude_input_in_output") != [True]:
                ids = prompt + ids
            sender.send(self.response(prompt, asked, ids, []), flags=FINAL)
            return
        for at in range(0, len(ids), cut):
            if at and not self.wait(sender, stopped, after(delay)):
                return
            sender.send(self.response(prompt, asked, ids[at : at + cut], ids[:at]))
        sender.send(flags=FINAL)

    def wait(self, sender, stopped, over):
        """Wait until `over()`; whether the request was neither cancelled nor stopped meanwhile."""
        while True:
            ends = over()
            if sender.is_cancelled() or stopped.is_set():
                self.await_both(sender, stopped)
                if sender.is_cancelled():
                    self.requests.count("cancelled")
                self.end(sender)
                return False
            if ends:
                return True
            time.sleep(POLL_S)

    def await_both(self, sender, stopped):
        """Wait for the other sign to come, which shall be counted too."""
        late = after(0.3)
        while not (late() or (sender.is_cancelled() and stopped.is_set())):
            time.sleep(POLL_S)
