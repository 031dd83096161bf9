"""Admission: which requests may use the fleet now, which wait, and which are told to come back.

Two decisions, both pure, with time and chance as arguments. `limits` holds what a tenant has bought (rates and
concurrent streams), with the leases by which gateways divide it (`leases`) and a guess at what a request takes
(`estimate`). `queue` divides what there is when it is
not enough for everybody: by priority class, and inside a class by virtual token counters (`flows`).
"""
