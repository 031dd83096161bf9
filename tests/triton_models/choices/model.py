"""A Python-backend model that answers as TensorRT-LLM's engine does when it is asked for `num_return_sequences`.

The first 16 ids are special; the first other id of the prompt separates the answers that follow it, one for each
sequence, from the beginning again if there are more sequences than answers. Special ids say how to answer:

- 3, 4, 5: 1, 2 or 7 ids per message (all in one message without one)
- 6: take no notice of `num_return_sequences`; 9: number sequences from 1
- 7: a minute before the first message; 8: 50 ms between messages

Streaming, each step is a message of every sequence that has not ended; else each sequence is one message, the shortest
first. `sequence_index` comes only if there are several, and only the very last message is final. Log probabilities
repeat all since the beginning. A sequence ends with `end_id`, if that is given and fits. A request with `stop` ends the
running one with its id. Both that and cancellations are counted in metrics.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SPECIALS = 16


class TritonPythonModel:
    def initialize(self, args):
        self.running = {}
        self.counting = threading.Lock()  # metrics are not made for threads
        self.families = {
            what: pb_utils.MetricFamily(
                name=f"scripted_{what}_total", description=what, kind=pb_utils.MetricFamily.COUNTER
            )
            for what in ("cancelled", "stopped")
        }
        self.counters = {
            what: family.Metric(labels={"model": args["model_name"]}) for what, family in self.families.items()
        }

    def count(self, what):
        with self.counting:
            self.counters[what].increment(1)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.first(request, "stop"):
                running = self.running.get(request.request_id())
                if running is not None:
                    self.count("stopped")
                    running.set()
                sender.send(flags=FINAL)
                continue
            stopped = self.running[request.request_id()] = threading.Event()
            prompt = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()[0].tolist()
            end = self.first(request, "end_id")
            limit = self.first(request, "request_output_len")
            n = 1 if 6 in prompt else self.first(request, "num_return_sequences") or 1
            answers = self.answers(prompt, [] if end is None else [end], limit, n)
            cut = next((size for token, size in ((3, 1), (4, 2), (5, 7)) if token in prompt), 10**9)
            streaming = bool(self.first(request, "streaming"))
            messages = self.stream(answers, cut) if streaming else self.whole(answers)
            asked = set(request.requested_output_names())
            job = (request.request_id(), prompt, messages, asked, n, sender, stopped)
            threading.Thread(target=self.send, args=job, daemon=True).start()

    def first(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy().flatten()[0].item()

    def answers(self, prompt, end, limit, n):
        plain = [token for token in prompt if token >= SPECIALS]
        parts = [[]]
        for token in plain[1:]:
            if token == plain[0]:
                parts.append([])
            else:
                parts[-1].append(token)
        return [(parts[index % len(parts)] + end)[:limit] for index in range(n)]

    def stream(self, answers, cut):
        """(sequence, ids, ids before) of each message."""
        return [
            (index, ids[at : at + cut], ids[:at])
            for at in range(0, max(1, *map(len, answers)), cut)
            for index, ids in enumerate(answers)
            if at < len(ids) or at == 0
        ]

    def whole(self, answers):
        return [(index, ids, []) for index, ids in sorted(enumerate(answers), key=lambda answer: len(answer[1]))]

    def send(self, id_, prompt, messages, asked, n, sender, stopped):
        try:
            if not self.wait(sender, stopped, 60 if 7 in prompt else 0):
                return
            for at, (index, ids, before) in enumerate(messages):
                if 8 in prompt and not self.wait(sender, stopped, 0.05):
                    return
                values = {
                    "output_ids": [[ids + [-1] * 2]],
                    "sequence_length": [[len(ids)]],
                    "num_input_tokens": [[len(prompt)]],
                    "num_output_tokens": [[len(ids)]],
                    "kv_cache_reused_blocks": [[1 + index]],
                    "total_draft_tokens": [[10]],
                    "total_accepted_draft_tokens": [[7]],
                    **({"sequence_index": [[index + (9 in prompt)]]} if n > 1 else {}),
                }
                tensors = [
                    pb_utils.Tensor(name, np.array(values[name], dtype=np.int32))
                    for name in sorted(values.keys() & asked)
                ]
                if "output_log_probs" in asked:
                    logs = [[[-(token % 8) / 4 - index for token in before + ids]]]
                    tensors.append(pb_utils.Tensor("output_log_probs", np.array(logs, dtype=np.float32)))
                last = at == len(messages) - 1
                sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
        finally:
            del self.running[id_]

    def wait(self, sender, stopped, seconds):
        """Sleep, unless the request is cancelled or stopped."""
        until = time.monotonic() + seconds
        while True:
            if sender.is_cancelled() or stopped.is_set():
                time.sleep(0.3)  # for the other sign to come, which shall be counted too
                if sender.is_cancelled():
                    self.count("cancelled")
                sender.send(flags=FINAL)
                return False
            if time.monotonic() >= until:
                return True
            time.sleep(0.02)
