"""The compiled twin has the types of the other one."""

from gateway.relay.steady import PureSteadyStream

class SteadyStream(PureSteadyStream): ...
