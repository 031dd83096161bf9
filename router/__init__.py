"""The decision plane: what a request needs, what the fleet looks like, and where the request goes.

Everything here but `router.state` is pure: no I/O and no clock of its own (time is an argument), so that a decision can
be tested, replayed and explained.
"""
