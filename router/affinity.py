"""Consistent hashing with bounded loads: the floor of the router, which needs no memory at all.

Every conversation has a key, and rendezvous hashing (Thaler and Ravishankar 1998) gives every (key, endpoint) pair a
score; sorted by it, the endpoints are this conversation's order of preference. The order is a pure function of key and
fleet, so every gateway agrees on it without talking, and when an endpoint comes or goes only the conversations that
preferred it move. Loads are bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam
2016): a request goes to the first endpoint of its order that is under the bound, so that one hot conversation cannot
drown its home.
"""

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.fleet import Endpoint, Pool

LOAD_FACTOR = 1.25
"""How far above the mean an endpoint's requests in flight may go before its conversations spill."""
LOAD_FLOOR = 8
"""Requests in flight that are always allowed: below this, spilling costs more cache than it saves queueing."""

_SCORES = 2.0**64


def preference(key: int, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """`endpoints` in the order in which the conversation `key` (64 bits) prefers them."""
    if len(endpoints) == 1:
        return [endpoints[0]]
    return sorted(endpoints, key=lambda endpoint: xxh3_64_intdigest(endpoint.key, key), reverse=True)


def pool_preference(key: int, pools: Sequence[tuple[Pool, float]]) -> list[Pool]:
    """`pools` in order of preference, each first for a share of the keys in proportion to its weight.

    Weighted rendezvous hashing (Schindelhauer and Schomaker 2005): the score of a pool is `-weight / ln(u)`, with `u`
    its hash as a number in (0, 1).
    """
    if len(pools) == 1:
        return [pools[0][0]]

    def score(weighted: tuple[Pool, float]) -> float:
        pool, weight = weighted
        return -weight / math.log((xxh3_64_intdigest(pool.key, key) + 0.5) / _SCORES)

    return [pool for pool, _ in sorted(pools, key=score, reverse=True)]


def load_bound(in_flight: int, endpoints: int) -> int:
    """Requests in flight allowed at each of `endpoints` that carry `in_flight` together, the new one included."""
    return max(LOAD_FLOOR, math.ceil(LOAD_FACTOR * (in_flight + 1) / endpoints))


def within_bounds(order: list[Endpoint]) -> list[Endpoint]:
    """`order` with its first endpoint that is under the load bound moved to the front.

    There always is one: if all were at the bound, together they would carry more than they do.
    """
    if len(order) == 1:
        return order
    bound = load_bound(sum(endpoint.state.in_flight for endpoint in order), len(order))
    for position, endpoint in enumerate(order):
        if endpoint.state.in_flight + 1 <= bound:
            return order if position == 0 else [endpoint, *order[:position], *order[position + 1 :]]
    return order
