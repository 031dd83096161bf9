"""The Triton protocol: OpenAI requests answered by models of TensorRT-LLM over Triton's gRPC.

The way of a request through the modules, all but the last two lines pure:

- `contract`: a model's metadata and config -> which of the known tensor signatures it has, and how it streams;
- `parameters`: the OpenAI body -> typed, checked parameters;
- `tensors`: parameters -> a ModelInferRequest that holds only inputs the model declares, and outputs back to values;
- `tokens`, `token_form`: text to token ids, ends and stop words as such, for the engine that takes nothing else;
- `detokenizer`: token ids as they come -> text, counts, log probabilities;
- `text`: pieces of text as they come -> the text the client is to see (whole characters, stop strings cut off);
- `answer`: response messages -> text, finish reason, usage;
- `wire`: those -> the JSON and server-sent events of the OpenAI API;
- `choices`: the two together, for one answer or for several to one request;
- `failures`: gRPC statuses and the engine's messages -> `UpstreamError`;
- `stops`: a cancelled request -> the engine's own stop request, which `cancels` sends;
- `call` and `engine`: the RPCs, probes and their lifetimes; `vitals`: whether the model is alive; `pool_tokenizer`.
"""
