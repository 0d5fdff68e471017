-- sync-v1: applies one batch of one node to one lane, each batch at most once.
--
-- KEYS[1]    the lane's record (string)
-- KEYS[2]    this node's record in the lane: its last batch and the reply to it (string)
-- KEYS[3]    the lane's nodes (sorted set: instance -> store time when it was marked alive, us)
-- KEYS[4..]  the bucket of each entry, in the batch's order (strings)
--
-- ARGV[1]    the batch: Request::bytes() of src/sync/message.rs
--            9 numbers   wire version, lanes, sequence, recovery_us, silence_us, alive_us,
--                        entries, quotas, rests
--            16 bytes    instance
--            24 bytes    incarnation; zeros: the node does not know the lane yet
--            42 bytes    a quota, as at the head of a bucket's record: rate, token, burst, version,
--                        epoch_us behind the two letters of the layout
--            98 bytes    an entry, in the order of `apply_all` in bucket-v1.lua: the number of its
--                        quota from 1 and its flags (a byte each), and 12 numbers
--            6 numbers   the rest of an entry, behind it where they are not all zeros
-- ARGV[2]    the batch's hash, 8 bytes
--
-- Reply      the bytes of Reply::encode(), a bulk string, which is the node's record too
--            2 bytes     the letters of the layout
--            2 numbers   the batch's sequence, and when its node was marked as alive
--            8 bytes     the batch's hash
--            6 numbers   status, value, time_us, nodes, recovering_until_us, grants
--            24 bytes    the lane's incarnation
--            57 bytes    a grant: a status of one byte and 7 numbers; 3 more where its times are
--                        not those of the batch
--
-- Errors     TIDEGATE FOREIGN <key> <type>  a record of ours holds another program's value
--            TIDEGATE REQUEST <reason>      the batch is not one of this protocol
--
-- Expiry     A bucket is forgotten half a minute to a minute after it is full and its leases have
--            ended. The three records of the lane outlive every bucket of it, and last a day at
--            least.
-- Cost       O(entries), and O(log nodes) for the lane. Calls: TIME, an MGET of lane and buckets, a
--            TYPE for each that is not there, a GETRANGE; then a SETRANGE for each bucket (a SET
--            where it is new or its expiry has come near), a SET for the node, a SETRANGE for the
--            lane; and four times a second and node ZADD, ZREMRANGEBYSCORE, ZCARD and PEXPIRE.
--
-- Every number is a whole one, written as a little-endian double: struct reads those at half the
-- cost of integers. All that is computed here stays within 2^53, where doubles are exact; the node
-- brings each number of a batch within its bounds before it sends it (`bounded` in
-- src/sync/message.rs). The script mirrors src/store/model.rs step for step;
-- src/store/equality.rs runs both and compares every reply and state.
--
-- What happens to one bucket stands in bucket-v1.lua, which is sent before this file.
--
-- Redis does not roll back, so everything is read and validated first, then computed, and only
-- then written. One exception: the members are written before the computing, because only writing
-- tells their number; left alone they are a heartbeat and nothing else.

local HEADER_FORMAT, HEADER_BYTES = '<dddddddddc16c24', 9 * 8 + 16 + 24
local LANE_FORMAT, LANE_BYTES = '<c2dddddddddc24', #MAGIC + 9 * 8 + 24
local HASH_BYTES = 8
-- The head of a reply.
local REPLY_FORMAT, REPLY_BYTES = '<c2ddc8ddddddc24', #MAGIC + 8 * 8 + HASH_BYTES + 24
-- REPLY_BYTES - 1.
local REPLY_LAST = '97'
local NO_INCARNATION, NO_HASH = string.rep('\0', 24), string.rep('\0', HASH_BYTES)

local APPLIED, REBORN, STALE, CLONED, LANES, WIRE = 0, 1, 2, 3, 4, 5

local function refused(reason)
  return redis.error_reply('TIDEGATE REQUEST ' .. reason)
end

local function foreign(name)
  return redis.error_reply('TIDEGATE FOREIGN ' .. name .. ' ' .. call('TYPE', name).ok)
end

-- What went wrong with a record of the lane.
local function failed(name, answer)
  return answer.err:find('WRONGTYPE', 1, true) and foreign(name) or answer
end

-- Marks the node as alive, drops the dead, and returns how many there are, or nil and an error.
local function mark(instance, alive_us)
  local added = redis.pcall('ZADD', KEYS[3], now_us, instance)
  if type(added) == 'table' then
    return nil, failed(KEYS[3], added)
  end
  call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('(%.0f', now_us - alive_us))
  return call('ZCARD', KEYS[3])
end

local function write_buckets(records, places)
  for index = 1, #records do
    local place = places[index]
    if not place then
      -- Another program's value, or another quota's.
    elseif place == TAIL_AT or place == WHOLE_AT then
      -- In place, which is the cheapest way to write and leaves the expiry alone.
      call('SETRANGE', KEYS[3 + index], place, records[index])
    else
      call('SET', KEYS[3 + index], records[index], 'PX', place)
    end
  end
end

-- The batch, in the order of Model::sync.
local function sync()
  batch = ARGV[1]
  local hash = ARGV[2]
  if #ARGV ~= 2 or #batch < HEADER_BYTES or #hash ~= HASH_BYTES then
    return refused('cut short')
  end
  local wire, request_lanes, sequence, recovery_us, silence_us, alive_us, entries, quota_count,
    rests, instance, known = unpack_numbers(HEADER_FORMAT, batch)
  if wire ~= WIRE_VERSION then
    return refused('another wire version')
  end
  if entries < 0 or entries > ENTRIES_MAX then
    return refused('too many entries')
  end
  local bytes = HEADER_BYTES + quota_count * QUOTA_BYTES + entries * ENTRY_BYTES
    + rests * REST_BYTES
  if #batch ~= bytes or #KEYS ~= 3 + entries then
    return refused('entries, bytes and keys do not match')
  end

  local clock = call('TIME')
  local time_us = clock[1] * 1000000 + clock[2]
  now_us, time_ms = time_us, floor(time_us / 1000)
  local found = call('MGET', KEYS[1], unpack(KEYS, 4))
  -- The head alone: the rest is asked for by a resend, and costs as much to read as to make.
  local node = redis.pcall('GETRANGE', KEYS[2], '0', REPLY_LAST)
  if type(node) == 'table' then
    return failed(KEYS[2], node)
  end

  -- The lane's record.
  local lane, magic, lanes, seen_us, keep_ms, incarnation = found[1], nil, nil, nil, nil, nil
  recovering_until_us, nodes = 0, 0
  local function verdict(status, value)
    return pack(REPLY_FORMAT, MAGIC, 0, 0, NO_HASH, status, value or 0, now_us, 0,
      recovering_until_us, 0, incarnation)
  end
  if lane and #lane == LANE_BYTES then
    magic, lanes, recovering_until_us, lost_us, seen_us, gap_from_us, gap_silence_us, gap_until_us,
      keep_ms, nodes, incarnation = unpack_numbers(LANE_FORMAT, lane)
  end
  if lane and magic ~= MAGIC then
    local version = lane:match('^' .. MAGIC_LETTER .. '(%d)')
    if version and lane:sub(1, #MAGIC) ~= MAGIC then
      recovering_until_us, incarnation = 0, NO_INCARNATION
      return verdict(WIRE, tonumber(version))
    end
    return foreign(KEYS[1])
  elseif not lane and call('TYPE', KEYS[1]).ok ~= 'none' then
    return foreign(KEYS[1])
  end

  -- The node's record.
  local is_known, last, marked_us, last_hash, last_incarnation = node ~= '', 0, 0, nil, nil
  if is_known then
    if #node < REPLY_BYTES or node:sub(1, #MAGIC) ~= MAGIC then
      return foreign(KEYS[2])
    end
    local _
    _, last, marked_us, last_hash, _, _, _, _, _, _, last_incarnation =
      unpack_numbers(REPLY_FORMAT, node)
  end

  if seen_us and seen_us > now_us then
    now_us = seen_us
  end
  local born = instance .. pack('<i8', now_us)
  if not lane then
    lanes, incarnation, recovering_until_us = request_lanes, born, now_us + recovery_us
    lost_us, seen_us, gap_from_us, gap_silence_us, gap_until_us = 0, now_us, 0, 0, 0
    keep_ms = LANE_KEEP_MS
  end
  local function lane_record()
    return pack(LANE_FORMAT, MAGIC, lanes, recovering_until_us, lost_us, seen_us,
      gap_from_us, gap_silence_us, gap_until_us, keep_ms, nodes, incarnation)
  end
  -- The lane has lost its memory, or this node's place in it.
  local function reborn()
    call('SET', KEYS[1], lane_record(), 'PX', keep_ms)
    return verdict(REBORN)
  end

  if lanes ~= request_lanes then
    return verdict(LANES, lanes)
  end
  if known ~= NO_INCARNATION and known ~= incarnation then
    if lost_us == 0 then
      lost_us, recovering_until_us = now_us, now_us + recovery_us
    end
    return reborn()
  end

  -- The sequence rule: the batch is compared with the last one applied in this life of the lane.
  if is_known and last_incarnation ~= incarnation then
    if known == NO_INCARNATION then
      return verdict(STALE)
    end
    is_known, last = false, 0
  end
  if is_known and last == sequence then
    return last_hash == hash and call('GET', KEYS[2]) or verdict(CLONED)
  end
  if sequence < last then
    return verdict(STALE)
  end
  if sequence > last + 1 then
    incarnation, lost_us, recovering_until_us = born, now_us, now_us + recovery_us
    return reborn()
  end
  local silent_us = now_us - seen_us
  if silent_us > silence_us and (last > 0 or silent_us <= DOUBTFUL_US) then
    gap_from_us, gap_silence_us, gap_until_us = seen_us, silence_us, now_us + recovery_us
  end
  seen_us = now_us
  local marks = not is_known or now_us - marked_us >= MARK_US
  if marks then
    local count, failure = mark(instance, alive_us)
    if failure then
      return failure
    end
    nodes, marked_us = count, now_us
  end

  local parts = { pack(REPLY_FORMAT, MAGIC, sequence, marked_us, hash, APPLIED, 0, now_us, nodes,
    recovering_until_us, entries, incarnation) }
  local quotas, at = read_quotas(HEADER_BYTES + 1, quota_count)
  local records, places, longest_ms = apply_all(at, entries, quotas, found, parts)
  if not records then
    return refused('an entry of a quota that is not there')
  end
  local reply = table.concat(parts)
  local longer = longest_ms + BUCKET_MARGIN_MS > keep_ms
  if longer then
    keep_ms = longest_ms + BUCKET_MARGIN_MS
  end

  -- Changes nothing: who may not write in place is refused before anything is written.
  call('SETRANGE', KEYS[2], '0', '')
  write_buckets(records, places)
  call('SET', KEYS[2], reply, 'PX', keep_ms)
  if marks or longer then
    call('SET', KEYS[1], lane_record(), 'PX', keep_ms)
    call('PEXPIRE', KEYS[3], keep_ms)
  else
    call('SETRANGE', KEYS[1], '0', lane_record())
  end
  return reply
end

return sync()
