"""The server-side half of every write, in Lua, so that a write and its announcement are one atomic step.

Every script takes the same keys in the same order, the hashes of all families and, last, the stream `changes`, which
share one hash tag and so one cluster slot. Types are checked before the first write: Lua's writes are not rolled back,
and a script that found a wrong type half-way would leave half a write behind.

Besides documents (field `<source>/<id>`, value a JSON document) a family's hash has two kinds of fields of its own:

- `@epoch`: a random word written with the first document. A follower that finds it gone or changed knows that the
  hash was emptied, whether by a restart, a flush or an eviction.
- `@<source>`, on sources that publish as a whole: `<published_ms>:<content hash>` of the latest publication.
"""

PRELUDE = """
local families = #KEYS - 1
local changes = KEYS[#KEYS]
for i = 1, #KEYS do
  local kind, wanted = redis.call('TYPE', KEYS[i]).ok, i <= families and 'hash' or 'stream'
  if kind ~= 'none' and kind ~= wanted then
    return redis.error_reply('WRONGTYPE the key ' .. KEYS[i] .. ' holds a ' .. kind .. ' instead of a ' .. wanted)
  end
end
local function generation(value)
  local ok, document = pcall(cjson.decode, value)
  if ok and type(document) == 'table' and type(document.generation) == 'number' then return document.generation end
  return -1
end
local function published(mark) return tonumber(string.match(mark or '', '^(%d+):')) or -1 end
local function remove(key, source, kept)
  local prefix = source .. '/'
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, #prefix) == prefix and not kept[field] then redis.call('HDEL', key, field) end
  end
end
local function announce(operation, family, field)
  for i = 1, families do redis.call('HSETNX', KEYS[i], '@epoch', ARGV[1]) end
  return redis.call('XADD', changes, 'MAXLEN', '~', '1000', '*', 'operation', operation,
                    'family', family, 'field', field)
end
"""

PUT = (
    PRELUDE
    + """
-- ARGV: new epoch, family (its number), field, value. Returns the change's id, or '' if what is stored is as new.
local key = KEYS[tonumber(ARGV[2])]
local stored = redis.call('HGET', key, ARGV[3])
if stored and stored ~= ARGV[4] and generation(stored) >= generation(ARGV[4]) then return '' end
redis.call('HSET', key, ARGV[3], ARGV[4])
return announce('put', ARGV[2], ARGV[3])
"""
)

DELETE = (
    PRELUDE
    + """
-- ARGV: new epoch, family (its number), field. Returns the change's id.
redis.call('HDEL', KEYS[tonumber(ARGV[2])], ARGV[3])
return announce('delete', ARGV[2], ARGV[3])
"""
)

REPLACE_SOURCE = (
    PRELUDE
    + """
-- ARGV: new epoch, source, mark, '1' to replace a later publication too, then (family, field, value) repeated.
-- Returns the change's id, or '' if a later publication is there.
local source, mark = ARGV[2], ARGV[3]
if ARGV[4] ~= '1' then
  for i = 1, families do
    if published(redis.call('HGET', KEYS[i], '@' .. source)) > published(mark) then return '' end
  end
end
local kept = {}
for family = 1, families do kept[family] = {} end
for i = 5, #ARGV, 3 do
  local family = tonumber(ARGV[i])
  kept[family][ARGV[i + 1]] = true
  redis.call('HSET', KEYS[family], ARGV[i + 1], ARGV[i + 2])
end
for family = 1, families do
  remove(KEYS[family], source, kept[family])
  redis.call('HSET', KEYS[family], '@' .. source, mark)
end
return announce('replace', '', source)
"""
)

RESTORE = (
    PRELUDE
    + """
-- Puts back what a follower knew before the hashes were emptied, without undoing what was written since.
-- ARGV: new epoch, id of the last change the follower saw, number of marks, then (family, source, mark) repeated,
-- then (family, source, field, value) repeated. Returns how many documents were written.
local deleted = {}
for _, entry in ipairs(redis.call('XRANGE', changes, '(' .. ARGV[2], '+')) do
  local change = entry[2]
  deleted[(change[4] or '') .. ' ' .. (change[6] or '')] = change[2] == 'delete' or nil
end
local first = 4 + 3 * tonumber(ARGV[3])
local ours = {}
for i = 4, first - 1, 3 do
  local key, source, mark = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  local stored = redis.call('HGET', key, '@' .. source)
  if published(stored or '') < published(mark) then
    remove(key, source, {})
    redis.call('HSET', key, '@' .. source, mark)
    stored = mark
  end
  ours[ARGV[i] .. source] = stored == mark
end
local written = 0
for i = first, #ARGV, 4 do
  local family, source, field, value = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local key = KEYS[tonumber(family)]
  local current = ours[family .. source]
  if current == nil then current = redis.call('HEXISTS', key, '@' .. source) == 0 end
  local stored = redis.call('HGET', key, field)
  local newer = not stored or (stored ~= value and generation(stored) < generation(value))
  if current and newer and not deleted[family .. ' ' .. field] then
    redis.call('HSET', key, field, value)
    written = written + 1
  end
end
for i = 1, families do
  if redis.call('HEXISTS', KEYS[i], '@epoch') == 0 then written = written + 1 end
end
if written > 0 then announce('restore', '', '') end
return written
"""
)
