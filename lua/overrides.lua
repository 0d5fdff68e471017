-- overrides: takes a namespace's overrides in, and tells which have changed.
--
-- KEYS[1]    the overrides (hash): a name's number, its end, and its value; under '' the namespace's own numbers
-- KEYS[2]    the names by number (sorted set)
-- KEYS[3]    the names by end, of those that end (sorted set)
-- ARGV[1]    8 numbers, made by src/store/overrides.rs
--            birth, number   what the node knows: the life of these records (0 for none), and the last number of it
--            reads_all       1 if the node is reading all of them, page by page
--            page            at most so many names are told
--            most            at most so many names are kept
--            removed_ms      a name that was removed is kept for so long, so that nodes hear of it
--            cleaned         at most so many names that have ended are forgotten now
--            puts            how many names are to be set
-- ARGV[2..]  for each of these, four: name; value, empty if it is removed; when it ends, in milliseconds since 1970, 0 for
--            never; flags: 1 if the end is so long after now, 2 if it is set only where there is none, nor one that was removed
--
-- Reply      a bulk string: birth, number up to which it tells, time in milliseconds since 1970, flags (1 if the node has to read all of
--            them, 2 if there are more, 4 if what it knew was lost here), how many names were set, or need not be, before the first for which there was no room, names told;
--            for each of these: end, length of name and of value, name, value
-- Errors     TIDEGATE FOREIGN (key) <type>  a key holds another program's value
-- Expiry     none: an override holds until it is removed, or ends
-- Writes     if something is set or has ended
-- Cost       O(log n) for each name that is set, told or forgotten
--
-- A number is given to each name that is set: the time in microseconds, or one more than the last if that is not less. A node that
-- knows all up to one asks for those above it.

local call, max = redis.call, math.max
local DATA, ORDER, ENDS = KEYS[1], KEYS[2], KEYS[3]
local HEAD, FORMAT = '<dddd', '<dd'

local known_birth, known_number, reads_all, page, most, removed_ms, cleaned_most, puts =
  struct.unpack('<dddddddd', ARGV[1])
local clock = call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now_ms = math.floor(now_us / 1000)

for at, kind in ipairs({ 'hash', 'zset', 'zset' }) do
  local found = call('TYPE', KEYS[at]).ok
  if found ~= kind and found ~= 'none' then
    return redis.error_reply('TIDEGATE FOREIGN (key) ' .. found)
  end
end

-- What the namespace has: the life's name, the last number, the last one of those that have ended and were forgotten, and how many
-- names need no room: those that were removed, and switches.
local birth, number, forgotten, free = 0, 0, 0, 0
local head = call('HGET', DATA, '')
local is_whole = head and #head == 32 and call('HLEN', DATA) - 1 == call('ZCARD', ORDER)
if is_whole then
  birth, number, forgotten, free = struct.unpack(HEAD, head)
elseif call('EXISTS', DATA, ORDER, ENDS) > 0 then
  -- A part was lost: nodes know the rest.
  call('DEL', DATA, ORDER, ENDS)
end
local is_changed = false

-- There is always room for a removal, and for the switch of a limit.
local function needs_room(name, value)
  return value ~= '' and name:sub(1, 2) ~= 's:'
end

local function read(name)
  local record = call('HGET', DATA, name)
  if not record then return nil end
  local record_number, ends_ms = struct.unpack(FORMAT, record)
  return record_number, ends_ms, record:sub(17)
end

for _, name in ipairs(call('ZRANGEBYSCORE', ENDS, '-inf', now_ms, 'LIMIT', 0, cleaned_most)) do
  local record_number, _, value = read(name)
  forgotten = max(forgotten, record_number)
  if not needs_room(name, value) then free = free - 1 end
  call('HDEL', DATA, name)
  call('ZREM', ORDER, name)
  call('ZREM', ENDS, name)
  is_changed = true
end

local has_lost = known_birth > 0 and (known_birth ~= birth or known_number > number)
if has_lost and known_birth == birth then
  -- The records are older than what this node knows. A new birth lets every node find that out.
  birth, is_changed = max(birth + 1, now_us), true
end
local count, taken = max(call('HLEN', DATA) - 1, 0) - free, 0
for put = 1, puts do
  local name, value, ends_ms, flags = ARGV[4 * put - 2], ARGV[4 * put - 1], tonumber(ARGV[4 * put]), tonumber(ARGV[4 * put + 1])
  local _, _, old = read(name)
  local had_room, wants_room = old and needs_room(name, old), needs_room(name, value)
  if flags % 2 == 1 then ends_ms = now_ms + ends_ms end
  if value == '' then ends_ms = now_ms + removed_ms end
  if wants_room and not had_room and count >= most then break end
  taken = taken + 1
  -- What a node restores must not undo a removal.
  if not old or flags < 2 then
    count = count + (wants_room and 1 or 0) - (had_room and 1 or 0)
    free = free + (wants_room and 0 or 1) - (old and not had_room and 1 or 0)
    if birth == 0 then birth = now_us end
    -- A store that went back to an older state gives no number again.
    number, is_changed = max(number + 1, now_us), true
    call('HSET', DATA, name, struct.pack(FORMAT, number, ends_ms) .. value)
    call('ZADD', ORDER, number, name)
    if ends_ms > 0 then call('ZADD', ENDS, ends_ms, name) else call('ZREM', ENDS, name) end
  end
end

if is_changed then
  call('HSET', DATA, '', struct.pack(HEAD, birth, number, forgotten, free))
end

local is_known = not has_lost and known_birth == birth and (reads_all == 1 or known_number >= forgotten)
local from = is_known and known_number or 0
local names = call('ZRANGEBYSCORE', ORDER, '(' .. string.format('%.0f', from), '+inf', 'LIMIT', 0, page + 1)
local told, has_more, up_to = {}, #names > page, number
for at = 1, math.min(#names, page) do
  local name = names[at]
  local record_number, ends_ms, value = read(name)
  told[at] = struct.pack('<dHH', ends_ms, #name, #value) .. name .. value
  if has_more then up_to = record_number end
end
local flags = (is_known and 0 or 1) + (has_more and 2 or 0) + (has_lost and 4 or 0)
return struct.pack('<dddddd', birth, up_to, now_ms, flags, taken, #told) .. table.concat(told)
