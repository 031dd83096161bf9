"""Shared state of a fleet's gateways in Redis or Valkey. The one part of `router` that does I/O.

`store` knows how documents lie in Redis, `scripts` holds the server-side half of each write, `follower` keeps a copy
of the documents up to date, and `fleet` is what a gateway uses of it all. Redis is a rebuildable copy here: files and
custom resources are the durable truth, and nothing on a request's path waits for it.
"""
