-- sync-v2: applies one batch of one node to one lane, each batch at most once.
--
-- KEYS[1]    the lane's record (string)
-- KEYS[2]    this node's record in the lane: its last batch and the reply to it (string)
-- KEYS[3]    the lane's nodes (sorted set: instance -> lane time when it was marked alive, us)
-- KEYS[4..]  the bucket of each entry, in the batch's order (strings)
-- KEYS[4 + entries..]  the nodes of each limit that the batch names (sorted sets: instance -> lane time
--            until which it counts, us)
--
-- ARGV[1]    the batch: Request::bytes() of src/sync/message.rs
--            16 numbers  wire version, lanes, sequence, recovery_us, lease_us, silence_us, alive_us,
--                        limit_alive_us, known_us, sent_us, nodes, flags, entries, quotas, more, limits
--            16 bytes    instance
--            24 bytes    incarnation; zeros: the node does not know the lane yet
--            50 bytes    a quota, as at the head of a bucket's record: rate, token, burst, version,
--                        epoch_us, algorithm behind the two letters of the layout
--            98 bytes    an entry, in the order of `apply_all` in bucket-v2.lua: the number of its
--                        quota from 1 and its flags (a byte each), and 12 numbers
--            15 numbers  the rest of an entry, behind it where they are not all zeros
--            a number    behind that, of a claim: what was charged in the window before, where it is not 0
--            a number    behind that, of a claim that registers its key: the lane's time of the view that tells it
-- ARGV[2]    the batch's hash, 8 bytes
--
-- Reply      the bytes of Reply::encode(), a bulk string, which is the node's record too
--            2 bytes     the letters of the layout
--            3 numbers   the batch's sequence, when its node was marked as alive, and which recovery of
--                        the lane it has settled for
--            8 bytes     the batch's hash
--            8 numbers   status, value, time_us, nodes, recovering_until_us, recovering_since_us,
--                        silence_us, grants
--            24 bytes    the lane's incarnation
--            57 bytes    a grant: a status of one byte and 7 numbers; 3 more where its times are
--                        not those of the batch; last, of a sliding window, what was charged in the one before
--                        where it is not 0
--            a number    for each limit that the batch names: nodes that have it
--
-- Errors     TIDEGATE FOREIGN <key> <type>  a record of ours holds another program's value
--            TIDEGATE REQUEST <reason>      the batch is not one of this protocol
--
-- Expiry     A bucket is forgotten 20 to 45 s after it is full and its leases have
--            ended; a node ten minutes after its last call, or half a minute after it left; the lane
--            and its list of nodes a day after the last call, and never before their buckets.
-- Cost       O(entries), and O(log nodes) for the lane. Calls: TIME, a GETRANGE, an MGET of lane and
--            buckets, a TYPE for each that is not there; then a SETRANGE for each bucket (a SET where
--            it is new or its expiry has come near), a SET for the node, a SETRANGE for the lane; and
--            four times a second and node ZADD, ZREMRANGEBYSCORE, ZCARD and PEXPIRE; in lane 0 the same for
--            each limit that the batch names. A batch that comes again reads no buckets.
--
-- Every number is a whole one, written as a little-endian double: struct reads those at half the
-- cost of integers. All that is computed here stays within 2^53, where doubles are exact, but
-- for one sum that is cut off there (bucket-v2.lua); the node
-- brings each number of a batch within its bounds before it sends it (`bounded` in
-- src/sync/message.rs). The script mirrors src/store/model.rs step for step;
-- src/store/equality.rs runs both and compares every reply and state.
--
-- What happens to one bucket stands in bucket-v2.lua, which is sent before this file.
--
-- Redis does not roll back, so everything is read and validated first, then computed, and only
-- then written. One exception: the members are written before the computing, because only writing
-- tells their number; left alone they are a heartbeat and nothing else.

local WIRE_VERSION, MAGIC_LETTER, ENTRIES_MAX = 2, 'T', 250
local HEADER_FORMAT, HEADER_BYTES = '<ddddddddddddddddc16c24', 16 * 8 + 16 + 24
local QUOTA_BYTES, ENTRY_BYTES = 50, 2 + 12 * 8
local LANE_FORMAT, LANE_BYTES = '<c2dddddddddc24', #MAGIC + 9 * 8 + 24
-- What a lane that waits has, or one that was ever lost.
local TROUBLED_FORMAT, TROUBLED_BYTES = '<dddddd', 6 * 8
local HASH_BYTES = 8
-- The head of a reply.
local REPLY_FORMAT, REPLY_BYTES = '<c2dddc8ddddddddc24', #MAGIC + 11 * 8 + HASH_BYTES + 24
-- REPLY_BYTES - 1.
local REPLY_LAST = '121'
local NO_INCARNATION, NO_HASH = string.rep('\0', 24), string.rep('\0', HASH_BYTES)
-- Flags of a batch.
local SETTLED, LEAVING = 1, 2

-- As in src/store/model.rs, where each is explained.
local LANE_KEEP_MS, NODE_KEEP_MS, LEFT_KEEP_MS, RECORD_MARGIN_MS = 24 * 3600 * 1000, 600000, 30000, 45000
local MARK_US = 250000
local TIMES_US, WAIT_MAX_US = 60000000, 30000000
local NOTHING, LOSS, SILENCE = 0, 1, 2

local APPLIED, REBORN, STALE, CLONED, LANES, WIRE = 0, 1, 2, 3, 4, 5

-- An error that names a record of ours which holds another program's value, or what else went wrong with
-- it.
local function failed(name, answer)
  if answer and not answer.err:find('WRONGTYPE', 1, true) then
    return answer
  end
  return redis.error_reply('TIDEGATE FOREIGN ' .. name .. ' ' .. call('TYPE', name).ok)
end

-- The batch, in the order of Model::sync.
local batch, hash = ARGV[1], ARGV[2]
if #ARGV ~= 2 or #batch < HEADER_BYTES or #hash ~= HASH_BYTES then
  return redis.error_reply('TIDEGATE REQUEST cut short')
end
local wire, request_lanes, sequence, recovery_us, lease_us, silence_us, alive_us, limit_alive_us, known_us,
  sent_us, known_nodes, flags, entries, quota_count, more, limits, instance, known =
  unpack_numbers(HEADER_FORMAT, batch)
if wire ~= WIRE_VERSION then
  return redis.error_reply('TIDEGATE REQUEST another wire version')
end
-- What is no number at all, or not a finite one, has a part that is not 0.
local parts_of_numbers = request_lanes % 1 + sequence % 1 + recovery_us % 1 + lease_us % 1 + silence_us % 1
  + alive_us % 1 + limit_alive_us % 1 + known_us % 1 + sent_us % 1 + known_nodes % 1 + flags % 1 + entries % 1
  + quota_count % 1 + more % 1 + limits % 1
if parts_of_numbers ~= 0 or request_lanes < 1 or request_lanes >= 2^32
  or min(sequence, recovery_us, lease_us, silence_us, alive_us, limit_alive_us, known_us, sent_us, known_nodes,
    flags, entries, quota_count, more, limits) < 0
  or max(sequence, recovery_us, lease_us, silence_us, alive_us, limit_alive_us, known_us, sent_us,
    known_nodes) > 2^52 then
  return redis.error_reply('TIDEGATE REQUEST a number that is not natural')
end
if entries > ENTRIES_MAX then
  return redis.error_reply('TIDEGATE REQUEST too many entries')
end
if #batch ~= HEADER_BYTES + quota_count * QUOTA_BYTES + entries * ENTRY_BYTES + more * 8
  or #KEYS ~= 3 + entries + limits then
  return redis.error_reply('TIDEGATE REQUEST entries, bytes and keys do not match')
end

local clock = call('TIME')
local time_us = clock[1] * 1000000 + clock[2]
local now_us, time_ms = time_us, floor(time_us / 1000)

-- The node's record: its head alone. The rest is asked for by a resend, and costs as much to read as to
-- make.
local node = redis.pcall('GETRANGE', KEYS[2], '0', REPLY_LAST)
if type(node) == 'table' then
  return failed(KEYS[2], node)
end
local is_known, last, marked_us, settled_us, last_hash, last_incarnation = node ~= '', 0, 0, 0, nil, nil
if is_known then
  if #node < REPLY_BYTES or node:sub(1, #MAGIC) ~= MAGIC then
    return failed(KEYS[2])
  end
  local _
  _, last, marked_us, settled_us, last_hash, _, _, _, _, _, _, _, _, last_incarnation =
    unpack_numbers(REPLY_FORMAT, node)
end

-- The buckets are not read for a batch that comes again.
local comes_again = is_known and last == sequence and last_incarnation == known
local found = comes_again and { call('GET', KEYS[1]) } or call('MGET', KEYS[1], unpack(KEYS, 4, 3 + entries))

-- The lane's record.
local lane, magic = found[1], nil
local lane_bytes = lane and #lane or 0
local lanes, seen_us, offset_us, keep_ms, nodes, most_nodes, silence_limit_us, silence_set_us, since_us,
  incarnation
local lost_us, reason, from_us, until_us, expected, settled = 0, NOTHING, 0, 0, 0, 0
if lane_bytes == LANE_BYTES or lane_bytes == LANE_BYTES + TROUBLED_BYTES then
  magic, lanes, seen_us, offset_us, keep_ms, nodes, most_nodes, silence_limit_us, silence_set_us, since_us,
    incarnation = unpack_numbers(LANE_FORMAT, lane)
  if lane_bytes > LANE_BYTES then
    lost_us, reason, from_us, until_us, expected, settled =
      unpack_numbers(TROUBLED_FORMAT, lane, LANE_BYTES + 1)
  end
end
if lane and magic ~= MAGIC then
  local version = lane:match('^' .. MAGIC_LETTER .. '(%d)')
  if version and lane:sub(1, #MAGIC) ~= MAGIC then
    return pack(REPLY_FORMAT, MAGIC, 0, 0, 0, NO_HASH, WIRE, tonumber(version), now_us, 0, 0, 0, 0, 0,
      NO_INCARNATION)
  end
  return failed(KEYS[1])
elseif not lane and call('TYPE', KEYS[1]).ok ~= 'none' then
  return failed(KEYS[1])
end
if lane then
  now_us = max(time_us + offset_us, seen_us)
  offset_us = now_us - time_us
end

-- The sequence rule compares the batch with the last one applied in this life of the lane. All but a batch
-- that follows on it, in a lane that everybody knows by name and that was not silent, is here.
local is_next = lane and lanes == request_lanes and known == incarnation and known_us <= seen_us
  and now_us - seen_us <= silence_limit_us and now_us - seen_us <= silence_us
  and (last_incarnation == incarnation and sequence == last + 1 or not is_known and sequence == 1)
if not is_next then
  local known_birth_us = min(max(unpack_numbers('<i8', known, 17), 0), 2^52)

  -- Whether the lane gives less than it has, because it waits for what its nodes know.
  local function waits()
    return reason ~= NOTHING and now_us < until_us and (expected == 0 or settled < expected)
  end
  local function recover(why, from, wait_us, count)
    if waits() then
      -- A loss outlasts a silence that comes on top of it.
      if reason == LOSS and why == SILENCE then why, from = LOSS, from_us end
      count = max(count, expected)
    end
    reason, from_us, since_us, settled = why, from, now_us, 0
    until_us, expected = now_us + min(wait_us, WAIT_MAX_US), count
  end
  -- `from_us` is after a loss the latest time of the lane before it that a node has told of.
  local function lose()
    local is_lost_again = lost_us > 0 and reason == LOSS and waits()
    lost_us = now_us
    recover(LOSS, is_lost_again and from_us or 0, max(lease_us, recovery_us), known_nodes)
  end
  -- A node calls: judges by the longest silence that a node of the last minute asks for whether there was
  -- an outage.
  local function hear()
    if silence_us >= silence_limit_us or now_us - silence_set_us > TIMES_US then
      silence_limit_us, silence_set_us = silence_us, now_us
    end
    if now_us - seen_us > silence_limit_us then
      recover(SILENCE, seen_us, alive_us, nodes)
    end
    seen_us = now_us
    if not waits() then
      reason, from_us, until_us, expected, settled = NOTHING, lost_us > 0 and from_us or 0, 0, 0, 0
    end
  end
  local function verdict(status, value)
    return pack(REPLY_FORMAT, MAGIC, 0, 0, 0, NO_HASH, status, value or 0, now_us, nodes,
      waits() and until_us or 0, since_us, silence_limit_us, 0, incarnation)
  end
  -- The lane has lost its memory, or this node's place in it. After the last life that is known begins a
  -- new one.
  local function reborn(last_birth_us)
    hear()
    if last_birth_us then
      incarnation = instance .. pack('<i8', max(now_us, last_birth_us) + 1)
      lose()
    end
    if lost_us > 0 and reason ~= SILENCE then from_us = max(from_us, known_us) end
    expected = max(expected, known_nodes)
    local record = pack(LANE_FORMAT, MAGIC, lanes, seen_us, offset_us, keep_ms, nodes, most_nodes,
      silence_limit_us, silence_set_us, since_us, incarnation)
    if reason ~= NOTHING or lost_us > 0 then
      record = record .. pack(TROUBLED_FORMAT, lost_us, reason, from_us, until_us, expected, settled)
    end
    call('SET', KEYS[1], record, 'PX', keep_ms)
    return verdict(REBORN)
  end

  if not lane then
    -- Its time goes on from the last that is known.
    now_us = max(time_us, known_us)
    lanes, seen_us, keep_ms, nodes, most_nodes = request_lanes, now_us, LANE_KEEP_MS, 0, 0
    offset_us, silence_limit_us, silence_set_us, since_us = now_us - time_us, silence_us, now_us, 0
    incarnation = instance .. pack('<i8', max(now_us, known_birth_us) + 1)
    recover(LOSS, 0, recovery_us, 0)
  end
  if lanes ~= request_lanes then
    return verdict(LANES, lanes)
  end
  local birth_us = unpack_numbers('<i8', incarnation, 17)
  if known_birth_us > birth_us or known == incarnation and known_us > seen_us then
    -- An older state has come back: whatever it knows is out of date.
    return reborn(known_birth_us)
  end
  if known ~= NO_INCARNATION and known ~= incarnation then
    if lost_us == 0 then
      -- Whoever called first did not know that the lane had been there before.
      lose()
      expected = expected + nodes
    end
    return reborn()
  end
  if is_known and last_incarnation ~= incarnation then
    if known == NO_INCARNATION then
      return verdict(STALE)
    end
    is_known, last, settled_us = false, 0, 0
  end
  if is_known and last == sequence then
    return last_hash == hash and call('GET', KEYS[2]) or verdict(CLONED)
  end
  if sequence < last then
    return verdict(STALE)
  end
  if sequence > last + 1 then
    if not is_known and now_us - known_us > NODE_KEEP_MS * 1000 then
      -- The node was away for so long that it is not remembered.
      return verdict(STALE)
    end
    return reborn(birth_us)
  end
  hear()
else
  if silence_us >= silence_limit_us or now_us - silence_set_us > TIMES_US then
    silence_limit_us, silence_set_us = silence_us, now_us
  end
  seen_us = now_us
  if reason == NOTHING or now_us >= until_us or expected > 0 and settled >= expected then
    reason, from_us, until_us, expected, settled = NOTHING, lost_us > 0 and from_us or 0, 0, 0, 0
  end
end

-- Puts the node into a sorted set with this score, or takes it out where it leaves; drops those whose score is
-- below `least`, and returns how many there are. An error where the key holds another program's value.
local is_leaving = flags >= LEAVING
local function mark_and_count(name, score, least)
  local done = is_leaving and redis.pcall('ZREM', name, instance)
    or not is_leaving and redis.pcall('ZADD', name, score, instance)
  if type(done) == 'table' then
    return nil, failed(name, done)
  end
  call('ZREMRANGEBYSCORE', name, '-inf', string.format('(%.0f', least))
  -- At once: a batch that is refused below leaves nothing that stays.
  call('PEXPIRE', name, keep_ms)
  return call('ZCARD', name)
end
local marks = not is_known or now_us - marked_us >= MARK_US or is_leaving
if marks then
  local alive, foreign = mark_and_count(KEYS[3], now_us, now_us - alive_us)
  if foreign then
    return foreign
  end
  nodes, marked_us, most_nodes = alive, now_us, max(most_nodes, alive)
end
local limit_nodes = {}
for index = 1, limits do
  local name = KEYS[3 + entries + index]
  local alive, foreign = mark_and_count(name, now_us + limit_alive_us, now_us)
  if foreign then
    return foreign
  end
  limit_nodes[index] = pack('<d', alive)
end
-- A batch that is older than this was sent before its node took what it does not tell of.
if known == NO_INCARNATION then
  -- Nobody waits for a node that has never called before.
  settled_us = since_us
elseif flags % 2 >= SETTLED and now_us - sent_us <= silence_limit_us and settled_us ~= since_us then
  settled_us = since_us
  -- Outside of a recovery a node that settles is not counted.
  if reason ~= NOTHING then settled = settled + 1 end
end

local is_waiting = reason ~= NOTHING and now_us < until_us and (expected == 0 or settled < expected)
local is_lost, is_returning = is_waiting and reason == LOSS, is_waiting and reason == SILENCE
local gives = not is_lost and (settled_us == since_us or not is_returning)
local parts = { pack(REPLY_FORMAT, MAGIC, sequence, marked_us, settled_us, hash, APPLIED, 0, now_us, nodes,
  is_waiting and until_us or 0, since_us, silence_limit_us, entries, incarnation) }
local records, places, longest_ms = apply_all(batch, HEADER_BYTES + 1, entries, quota_count, more, found, parts,
  now_us, time_ms, nodes, gives, recovery_us, is_returning, reason == SILENCE and since_us or 0, lost_us,
  is_lost, expected, most_nodes, from_us, since_us, max(expected - settled, 0))
if not records then
  return redis.error_reply('TIDEGATE REQUEST a quota that is none, or an entry without a part that it names')
end
local reply = table.concat(parts) .. table.concat(limit_nodes)
local longer = longest_ms + RECORD_MARGIN_MS > keep_ms
if longer then
  keep_ms = longest_ms + RECORD_MARGIN_MS
end

-- Changes nothing: who may not write in place is refused before anything is written.
call('SETRANGE', KEYS[2], '0', '')
for index = 1, #records do
  local place = places[index]
  if not place then
    -- Another program's value, or another quota's.
  elseif type(place) == 'string' then
    -- In place, which is the cheapest way to write and leaves the expiry alone.
    call('SETRANGE', KEYS[3 + index], place, records[index])
  else
    call('SET', KEYS[3 + index], records[index], 'PX', place)
  end
end
call('SET', KEYS[2], reply, 'PX', is_leaving and LEFT_KEEP_MS or NODE_KEEP_MS)
local record = pack(LANE_FORMAT, MAGIC, lanes, seen_us, offset_us, keep_ms, nodes, most_nodes,
  silence_limit_us, silence_set_us, since_us, incarnation)
if reason ~= NOTHING or lost_us > 0 then
  record = record .. pack(TROUBLED_FORMAT, lost_us, reason, from_us, until_us, expected, settled)
end
if marks or longer or #record ~= lane_bytes then
  call('SET', KEYS[1], record, 'PX', keep_ms)
  if longer then
    call('PEXPIRE', KEYS[3], keep_ms)
  end
else
  call('SETRANGE', KEYS[1], '0', record)
end
return reply
