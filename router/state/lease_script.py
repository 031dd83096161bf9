"""The shared side of limits: one hash per tenant (and route), one script that settles, fills, grants and counts.

    headrace:{<fleet>}:limits:<tenant>           of all its requests together
    headrace:{<fleet>}:limits:<tenant>:<route>   of those to one route

The hash holds a token bucket per kind of unit (its level under the kind's name, and one time `at` for all), and one
field per gateway with the permits it holds for concurrent streams (`@<gateway>`: `<permits>:<Unix time at which they
expire>`). It expires when it says no more than a new one would: a bucket that is not there is full, unless the gateway
that asks believes otherwise, so that a store that came back empty does not hand out every limit twice.

The clock is the server's. If it goes back, nothing fills until it has caught up. A bucket's level may be below zero:
then more was spent than was there. Permits a gateway says it holds are never taken from it, even where they are more
than the limit leaves: the streams are open.

Besides, gateways that hold limits tell that they are there, so that each knows among how many a limit is to be divided
when the store is out of reach:

    headrace:{<fleet>}:limiters   a sorted set of gateways by the Unix time until which they count
"""

from router.admission.leases import MINUTE_S, PERMITS_EXPIRE_S, RateGrant
from router.admission.limits import Ask, Grant

CLOCK = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
"""

GRANT = """
-- KEYS: the hash. ARGV: gateway, seconds that permits last, seconds of a full bucket, number of buckets, then
-- (kind, limit, settle, want, believed) for each, then, if streams are limited, (limit, keep, want).
-- Returns (units, level) for each bucket, then the permits; as strings, which are not cut to integers.
local key, gateway, lasting, full = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local buckets = tonumber(ARGV[4])
local function exact(number) return string.format('%.17g', number) end
local at = tonumber(redis.call('HGET', key, 'at') or now)
local elapsed = math.max(0, now - at)
now = math.max(now, at)
local answer, expires = {}, now + full
for i = 0, buckets - 1 do
  local kind, limit = ARGV[5 + 5 * i], tonumber(ARGV[6 + 5 * i])
  local settle, want, believed = tonumber(ARGV[7 + 5 * i]), tonumber(ARGV[8 + 5 * i]), tonumber(ARGV[9 + 5 * i])
  local stored = tonumber(redis.call('HGET', key, kind) or '')
  local level = math.min(limit, stored and stored + elapsed * limit / full or believed)
  level = math.min(limit, level - settle)
  local units = math.max(0, math.floor(math.min(want, level)))
  level = level - units
  redis.call('HSET', key, kind, exact(level))
  if limit > 0 then expires = math.max(expires, now + (limit - level) / limit * full) end
  answer[#answer + 1] = string.format('%d', units)
  answer[#answer + 1] = exact(level)
end
local granted = 0
local first = 5 + 5 * buckets
if ARGV[first] then
  local limit, keep, want = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local others = 0
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 1) == '@' and fields[i] ~= '@' .. gateway then
      local permits, until_ = string.match(fields[i + 1], '^(%d+):(.+)$')
      if tonumber(until_) > now then others = others + tonumber(permits) else redis.call('HDEL', key, fields[i]) end
    end
  end
  granted = math.max(keep, math.min(want, limit - others))
  if granted > 0 then
    redis.call('HSET', key, '@' .. gateway, string.format('%d', granted) .. ':' .. exact(now + lasting))
    expires = math.max(expires, now + lasting)
  else
    redis.call('HDEL', key, '@' .. gateway)
  end
end
answer[#answer + 1] = string.format('%d', granted)
redis.call('HSET', key, 'at', exact(now))
redis.call('PEXPIRE', key, string.format('%d', math.ceil((expires - now) * 1000)))
return answer
"""

SCRIPT = CLOCK + GRANT

PRESENT = (
    CLOCK
    + """
-- KEYS: the sorted set. ARGV: gateway, seconds for which it counts. Returns how many gateways there are.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[2]) * 1000))
return redis.call('ZCARD', KEYS[1])
"""
)
"""How a gateway says that it is there."""


def arguments(gateway: str, ask: Ask) -> list[str]:
    """The script's ARGV."""
    sent = [gateway, repr(PERMITS_EXPIRE_S), repr(MINUTE_S), str(len(ask.rates))]
    for kind, rate in ask.rates:
        sent += [kind, repr(rate.limit), repr(rate.settle), repr(rate.want), repr(rate.believed)]
    if ask.streams is not None:
        sent += [str(ask.streams.limit), str(ask.streams.keep), str(ask.streams.want)]
    return sent


def grant(answer: list[bytes]) -> Grant:
    """What the script's answer says."""
    *rates, permits = answer
    given = zip(rates[::2], rates[1::2], strict=True)
    return Grant(tuple(RateGrant(int(units), float(level)) for units, level in given), int(permits))
