"""A client for gRPC calls of one request message and a stream of responses, over HTTP/2 of our own.

A token of an answer costs what happens between two wake-ups. With grpc.aio that is a poller's thread, a socket pair, a
turn of the event loop, a future and a task for each message; here it is one `data_received`, which hands every message
of every stream that a read of the socket holds to its receiver before it returns. Nothing else is gained by it, so
nothing else is done with it: probes, stop requests and the KServe front's streams go over grpc.aio.

- `frames`: bytes <-> frames (RFC 9113), pure;
- `headers`: bytes <-> header fields (HPACK, RFC 7541), pure;
- `sending`: the requests' bodies, as far as the server has room for them;
- `stream`: what every stream has;
- `connection`: one connection, its streams, and what a server may do to them;
- `grpc_stream`: a stream as a gRPC call: messages, status;
- `channel`: the connection to one server, made when it is needed.

Plain text with prior knowledge only, as Triton serves it. Nothing is pinged, because Triton answers that with GOAWAY,
and no clock is watched but while connecting: the kernel ends a connection whose other end does not acknowledge.
"""
