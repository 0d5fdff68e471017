-- sync-v1: applies one batch of one node to one lane, each batch at most once.
--
-- KEYS[1]    the lane's record (string)
-- KEYS[2]    this node's record in the lane: its last batch and the reply to it (string)
-- KEYS[3]    the lane's nodes (sorted set: instance -> store time of its last batch, us)
-- KEYS[4..]  the bucket of each entry, in the batch's order (strings)
--
-- ARGV[1]    the batch: Request::bytes() of src/sync/message.rs
--            7 numbers   wire version, lanes, sequence, recovery_us, silence_us, alive_us, entries
--            16 bytes    instance
--            24 bytes    incarnation; zeros: the node does not know the lane yet
--            24 numbers  an entry, in the order of `entry_of` below
-- ARGV[2]    the batch's hash, 8 bytes
--
-- Reply      the bytes of Reply::encode(), a bulk string
--            6 numbers   status, value, time_us, nodes, recovering_until_us, grants
--            24 bytes    the lane's incarnation
--            12 numbers  a grant
--
-- Errors     TIDEGATE FOREIGN <key> <type>  a record of ours holds another program's value
--            TIDEGATE REQUEST <reason>      the batch is not one of this protocol
--
-- Expiry     A bucket is forgotten a minute after it is full and its leases have ended. The three
--            records of the lane outlive every bucket of it, and last a day at least.
-- Cost       O(entries), and O(log nodes) for the lane. Calls: TIME, 2 GET, ZCARD, MGET and a TYPE
--            for each key not there; then 5 writes for the lane and a SET for each bucket.
--
-- Every number is a little-endian 64-bit integer. Lua's numbers are doubles: all that is computed
-- here stays within 2^53, where they are exact. The script mirrors src/store/model.rs step for
-- step; src/store/equality.rs runs both and compares every reply and state.
--
-- What happens to one bucket stands in bucket-v1.lua, which is sent before this file.
--
-- Redis does not roll back, so everything is read and validated first, then computed, and only
-- then written. One exception: the members are written before the computing, because only writing
-- tells their number; left alone they are a heartbeat and nothing else. It is the first write,
-- so a server that cannot write refuses there.

---------------------------------------------------------------------------------------------------
-- Reading and validating

local function natural(number)
  return min(max(number, 0), NUMBER_MAX)
end

local function positive(number, most)
  return min(max(number, 1), most)
end

-- Nothing to do for any entry that a node of ours sends: one look at the extremes tells.
local function bounded(entry)
  for field, number in pairs(entry) do
    entry[field] = natural(number)
  end
  entry.rate = positive(entry.rate, RATE_MAX)
  entry.token = positive(entry.token, NUMBER_MAX)
  entry.burst = positive(entry.burst, NUMBER_MAX)
  entry.epoch_us = positive(entry.epoch_us, EPOCH_US_MAX)
end

local function entry_of(bytes, at)
  local rate, token, burst, version, epoch_us, spent, debt, allowed,
    back_units, lost, back_rate, back_depth, held_rate, held_depth, held_lent, held_stamp_us,
    held_demand, held_tag, demand, want, want_rate, flags, claim, needed = struct.unpack(ENTRY_FORMAT, bytes, at)
  local entry = {
    rate = rate, token = token, burst = burst, version = version, epoch_us = epoch_us,
    spent = spent, debt = debt, allowed = allowed,
    back_units = back_units, lost = lost, back_rate = back_rate, back_depth = back_depth,
    held_rate = held_rate, held_depth = held_depth, held_lent = held_lent,
    held_stamp_us = held_stamp_us, held_demand = held_demand, held_tag = held_tag,
    demand = demand, want = want, want_rate = want_rate, needed = needed,
  }
  local least = min(version, spent, debt, allowed, back_units, lost, back_rate, back_depth,
    held_rate, held_depth, held_stamp_us, held_demand, held_tag, demand, want, want_rate, needed)
  local most = max(token, burst, version, spent, debt, allowed, back_units, lost, back_rate,
    back_depth, held_rate, held_depth, held_stamp_us, held_demand, held_tag, demand, want,
    want_rate, needed)
  if least < 0 or most > NUMBER_MAX or min(rate, token, burst, epoch_us) < 1
    or rate > RATE_MAX or epoch_us > EPOCH_US_MAX then
    bounded(entry)
  end
  entry.held_lent = within(held_lent)
  entry.restore = flags % 2 >= 1
  if flags % 4 >= 2 then
    entry.claim = within(claim)
  end
  return entry
end

-- The batch, or nil and what is wrong with it.
local function read_request()
  local bytes = ARGV[1]
  if #ARGV ~= 2 or #bytes < HEADER_BYTES or #ARGV[2] ~= HASH_BYTES then
    return nil, 'cut short'
  end
  local wire, lanes, sequence, recovery_us, silence_us, alive_us, count =
    struct.unpack(HEADER_FORMAT, bytes)
  if wire ~= WIRE_VERSION then
    return nil, 'another wire version'
  end
  if count < 0 or count > ENTRIES_MAX then
    return nil, 'too many entries'
  end
  if #bytes ~= HEADER_BYTES + count * ENTRY_BYTES or #KEYS ~= 3 + count then
    return nil, 'entries, bytes and keys do not match'
  end
  local entries = {}
  for index = 1, count do
    entries[index] = entry_of(bytes, HEADER_BYTES + (index - 1) * ENTRY_BYTES + 1)
  end
  return {
    lanes = lanes,
    sequence = natural(sequence),
    recovery_us = natural(recovery_us),
    silence_us = natural(silence_us),
    alive_us = natural(alive_us),
    instance = bytes:sub(57, 72),
    incarnation = bytes:sub(73, 96),
    hash = ARGV[2],
    entries = entries,
  }
end

local function foreign(name, kind)
  return redis.error_reply('TIDEGATE FOREIGN ' .. name .. ' ' .. kind)
end

local function type_of(name)
  return redis.call('TYPE', name).ok
end

-- Reads one of the lane's three records: what `command` says, or nil and an error.
local function read(command, name)
  local found = redis.pcall(command, name)
  if type(found) ~= 'table' then
    return found
  end
  if found.err:find('WRONGTYPE', 1, true) then
    return nil, foreign(name, type_of(name))
  end
  return nil, found
end

-- The lane's record, false if there is none, or nil and the wire version of what is there
-- (nil too if it is no record of ours).
local function lane_of(bytes)
  if not bytes then
    return false
  end
  if bytes:sub(1, #MAGIC) == MAGIC and #bytes == LANE_BYTES then
    local lanes, recovering_until_us, lost_us, seen_us, gap_from_us, gap_silence_us, gap_until_us,
      keep_ms, rest = struct.unpack(LANE_FORMAT, bytes, #MAGIC + 1)
    return {
      lanes = lanes, recovering_until_us = recovering_until_us, lost_us = lost_us,
      seen_us = seen_us, gap_from_us = gap_from_us, gap_silence_us = gap_silence_us,
      gap_until_us = gap_until_us, keep_ms = keep_ms, incarnation = bytes:sub(rest),
    }
  end
  local version = bytes:match('^' .. MAGIC_LETTER .. '(%d)')
  if version and bytes:sub(1, #MAGIC) ~= MAGIC then
    return nil, tonumber(version)
  end
  return nil
end

-- The node's record, false if there is none, nil if it is no record of ours.
local function node_of(bytes)
  if not bytes then
    return false
  end
  if bytes:sub(1, #MAGIC) ~= MAGIC or #bytes <= NODE_HEAD_BYTES then
    return nil
  end
  local sequence, rest = struct.unpack(NUMBER_FORMAT, bytes, #MAGIC + 1)
  return {
    sequence = sequence,
    hash = bytes:sub(rest, rest + HASH_BYTES - 1),
    incarnation = bytes:sub(rest + HASH_BYTES, NODE_HEAD_BYTES),
    reply = bytes:sub(NODE_HEAD_BYTES + 1),
  }
end

-- A bucket's record, nil if it is none of ours.
local function bucket_of(bytes)
  if #bytes ~= BUCKET_BYTES or bytes:sub(1, #MAGIC) ~= MAGIC then
    return nil
  end
  local rate, token, burst, version, epoch_us, level, stamp_us, epoch, leased0, leased1,
    depth0, depth1, lent0, lent1, demand0, demand1, charged, forgiven, central =
    struct.unpack(BUCKET_FORMAT, bytes, #MAGIC + 1)
  return {
    rate = rate, token = token, burst = burst, version = version, epoch_us = epoch_us,
    level = level, stamp_us = stamp_us, epoch = epoch, leased0 = leased0, leased1 = leased1,
    depth0 = depth0, depth1 = depth1, lent0 = lent0, lent1 = lent1,
    demand0 = demand0, demand1 = demand1,
    charged = charged, forgiven = forgiven, central = central,
  }
end

-- The buckets by key: a record, nil where there is none, and false for another program's value.
local function read_buckets(count)
  local buckets = {}
  if count == 0 then
    return buckets
  end
  local found = redis.call('MGET', unpack(KEYS, 4))
  for index = 1, count do
    local name = KEYS[3 + index]
    if found[index] then
      buckets[name] = bucket_of(found[index]) or false
    elseif type_of(name) ~= 'none' then
      -- MGET passes over other types in silence.
      buckets[name] = false
    end
  end
  return buckets
end

---------------------------------------------------------------------------------------------------
-- Computing: a batch

-- Answers one entry; a bucket that changed is marked to be written.
local function answer(name, entry, buckets, changed, lane, nodes, now_us)
  local bucket = buckets[name]
  if bucket == false then
    return pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
  end
  local fresh = bucket == nil
  if fresh then
    bucket = new_bucket(entry, lane, now_us)
  end
  if bucket.version < entry.version then
    refill(bucket, lane, now_us)
    adopt(bucket, entry)
  elseif bucket.version > entry.version or bucket.rate ~= entry.rate
    or bucket.token ~= entry.token or bucket.burst ~= entry.burst then
    return pack(GRANT_FORMAT, OTHER_QUOTA, bucket.version, bucket.rate, bucket.token, bucket.burst,
      0, 0, 0, 0, 0, 0, 0)
  end
  local given = apply(bucket, entry, fresh, lane, nodes, now_us)
  bucket.keep_ms = keep_ms_of(bucket)
  lane.keep_ms = max(lane.keep_ms, bucket.keep_ms + BUCKET_MARGIN_MS)
  buckets[name], changed[name] = bucket, true
  return given
end

local function encode_reply(lane, now_us, nodes, status, value, grants)
  local head = pack(REPLY_FORMAT, status, value, now_us, nodes, lane.recovering_until_us, #grants)
  return head .. lane.incarnation .. concat(grants)
end

local function verdict(lane, now_us, status, value)
  return encode_reply(lane, now_us, 0, status, value or 0, {})
end

local function new_lane(request, born, now_us)
  return {
    lanes = request.lanes, incarnation = born,
    recovering_until_us = now_us + request.recovery_us,
    lost_us = 0, seen_us = now_us,
    gap_from_us = 0, gap_silence_us = 0, gap_until_us = 0,
    keep_ms = LANE_KEEP_MS,
  }
end

---------------------------------------------------------------------------------------------------
-- Writing

local function write_lane(lane)
  local numbers_of_lane = pack(LANE_FORMAT, lane.lanes, lane.recovering_until_us, lane.lost_us,
    lane.seen_us, lane.gap_from_us, lane.gap_silence_us, lane.gap_until_us, lane.keep_ms)
  redis.call('SET', KEYS[1], MAGIC .. numbers_of_lane .. lane.incarnation, 'PX', lane.keep_ms)
end

local function write_node(request, lane, reply)
  local head = MAGIC .. pack(NUMBER_FORMAT, request.sequence) .. request.hash
  redis.call('SET', KEYS[2], head .. lane.incarnation .. reply, 'PX', lane.keep_ms)
end

local function write_bucket(name, bucket)
  local record = pack(BUCKET_FORMAT, bucket.rate, bucket.token, bucket.burst, bucket.version,
    bucket.epoch_us, bucket.level, bucket.stamp_us, bucket.epoch, bucket.leased0, bucket.leased1,
    bucket.depth0, bucket.depth1, bucket.lent0, bucket.lent1, bucket.demand0, bucket.demand1,
    bucket.charged, bucket.forgiven, bucket.central)
  redis.call('SET', name, MAGIC .. record, 'PX', bucket.keep_ms)
end

-- Marks the node as alive, drops the dead, and returns how many there are.
local function write_members(request, members, now_us)
  local added = redis.call('ZADD', KEYS[3], now_us, request.instance)
  local alive_from_us = string.format('(%.0f', now_us - request.alive_us)
  local removed = redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', alive_from_us)
  return members + added - removed
end

---------------------------------------------------------------------------------------------------
-- The batch, in the order of Model::sync

-- The lane has lost its memory, or this node's place in it.
local function reborn(lane, now_us)
  write_lane(lane)
  return verdict(lane, now_us, REBORN)
end

local function apply_batch(request, lane, members, buckets, now_us)
  lane.seen_us = now_us
  local nodes = write_members(request, members, now_us)
  local grants, changed = {}, {}
  for index, entry in ipairs(request.entries) do
    grants[index] = answer(KEYS[3 + index], entry, buckets, changed, lane, nodes, now_us)
  end
  local reply = encode_reply(lane, now_us, nodes, APPLIED, 0, grants)
  for index = 1, #grants do
    local name = KEYS[3 + index]
    if changed[name] then
      write_bucket(name, buckets[name])
      changed[name] = nil
    end
  end
  write_node(request, lane, reply)
  write_lane(lane)
  redis.call('PEXPIRE', KEYS[3], lane.keep_ms)
  return reply
end

-- Compares the batch with the last one applied: the sequence rule.
local function sequence_rule(request, lane, node, members, buckets, born, now_us)
  local known = request.incarnation ~= NO_INCARNATION
  if not known and node and node.incarnation ~= lane.incarnation then
    return verdict(lane, now_us, STALE)
  end
  if node and node.incarnation ~= lane.incarnation then
    node = false
  end
  if node and node.sequence == request.sequence then
    return node.hash == request.hash and node.reply or verdict(lane, now_us, CLONED)
  end
  local last = node and node.sequence or 0
  if request.sequence < last then
    return verdict(lane, now_us, STALE)
  end
  if request.sequence > last + 1 then
    lane.incarnation, lane.lost_us = born, now_us
    lane.recovering_until_us = now_us + request.recovery_us
    return reborn(lane, now_us)
  end
  local silent_us = now_us - lane.seen_us
  if silent_us > request.silence_us and (last > 0 or silent_us <= DOUBTFUL_US) then
    lane.gap_from_us, lane.gap_silence_us = lane.seen_us, request.silence_us
    lane.gap_until_us = now_us + request.recovery_us
  end
  return apply_batch(request, lane, members, buckets, now_us)
end

local function sync(request, lane, node, members, buckets, time_us)
  local now_us = lane and max(time_us, lane.seen_us) or time_us
  local born = request.instance .. pack(NUMBER_FORMAT, now_us)
  lane = lane or new_lane(request, born, now_us)
  if lane.lanes ~= request.lanes then
    return verdict(lane, now_us, LANES, lane.lanes)
  end
  if request.incarnation ~= NO_INCARNATION and request.incarnation ~= lane.incarnation then
    if lane.lost_us == 0 then
      lane.lost_us = now_us
      lane.recovering_until_us = now_us + request.recovery_us
    end
    return reborn(lane, now_us)
  end
  return sequence_rule(request, lane, node, members, buckets, born, now_us)
end

local function main()
  local request, reason = read_request()
  if not request then
    return redis.error_reply('TIDEGATE REQUEST ' .. reason)
  end
  local clock = redis.call('TIME')
  local time_us = clock[1] * 1000000 + clock[2]

  local lane_bytes, lane_error = read('GET', KEYS[1])
  local node_bytes, node_error = read('GET', KEYS[2])
  local members, members_error = read('ZCARD', KEYS[3])
  local failure = lane_error or node_error or members_error
  if failure then
    return failure
  end
  local lane, stored_wire = lane_of(lane_bytes)
  if stored_wire then
    local unknown = { recovering_until_us = 0, incarnation = NO_INCARNATION }
    return verdict(unknown, time_us, WIRE, stored_wire)
  end
  local node = node_of(node_bytes)
  if lane == nil then
    return foreign(KEYS[1], 'string')
  end
  if node == nil then
    return foreign(KEYS[2], 'string')
  end
  local buckets = read_buckets(#request.entries)
  return sync(request, lane, node, members, buckets, time_us)
end

return main()
