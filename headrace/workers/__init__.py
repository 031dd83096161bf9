"""Several gateway processes as one: `headrace gateway --workers N`.

One supervisor process owns what there is only once: the HTTP port, the admin port, the publication of the fleet file.
It reads no request. Each worker is a whole gateway (`gateway.app`) that accepts from the supervisor's HTTP socket,
listens on the shared gRPC port, and follows the shared state like any other gateway of the fleet.

- `channel`: what the two tell each other, and how, over one socketpair for each worker;
- `__main__`, `worker`: the worker's process, from its first message to its last;
- `slot`: one worker's place: starts a process for it, hears its reports, starts another when it has ended;
- `generation`: the workers that were started together, to serve the same;
- `totals`: many workers' reports as the figures and phases of one gateway;
- `supervisor`: owner of ports and slots, and what the admin API is about.
"""
