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
--            11 numbers  a grant
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
-- Redis does not roll back, so everything is read and validated first, then computed, and only
-- then written. One exception: the members are written before the computing, because only writing
-- tells their number; left alone they are a heartbeat and nothing else. It is the first write,
-- so a server that cannot write refuses there.

local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local pack, concat = struct.pack, table.concat

local WIRE_VERSION = 1
local MAGIC_LETTER = 'T'
local MAGIC = MAGIC_LETTER .. WIRE_VERSION
local ENTRIES_MAX = 250

-- As in src/store/model.rs, where each is explained.
local LANE_KEEP_MS = 24 * 3600 * 1000
local BUCKET_MARGIN_MS = 60000
local EMPTY_AFTER_LOSS_US = 60000000
local DEBT_US = 1000000
-- The most that a node may owe on credit, in tokens.
local CREDIT_TOKENS = 15
-- Debt is repaid in about this time, by a sixteenth of the rate at least and half of it at most.
local REPAY_US, REPAY_LEAST_PART = 100000, 16
-- When a new node is the first to call after a silence, nobody can tell whether the others were
-- cut off or have ended: up to so long it is taken for an outage.
local DOUBTFUL_US = 600000000
local NUMBER_MAX = 2 ^ 52
local SUM_MAX = 2 ^ 53
local RATE_MAX = floor(NUMBER_MAX / DEBT_US)
local EPOCH_US_MAX = 2 ^ 50

local HEADER_BYTES, ENTRY_BYTES, HASH_BYTES = 96, 192, 8
local INCARNATION_BYTES = 24
local NO_INCARNATION = string.rep('\0', INCARNATION_BYTES)

local function numbers(count)
  return '<' .. string.rep('i8', count)
end

local HEADER_FORMAT = numbers(7)
local ENTRY_FORMAT = numbers(24)
local LANE_FORMAT = numbers(8)
local BUCKET_FORMAT = numbers(19)
local REPLY_FORMAT = numbers(6)
local GRANT_FORMAT = numbers(11)
local NUMBER_FORMAT = numbers(1)

local LANE_BYTES = #MAGIC + 8 * 8 + INCARNATION_BYTES
local NODE_HEAD_BYTES = #MAGIC + 8 + HASH_BYTES + INCARNATION_BYTES
local BUCKET_BYTES = #MAGIC + 19 * 8

local APPLIED, REBORN, STALE, CLONED, LANES, WIRE = 0, 1, 2, 3, 4, 5
local GIVEN, OTHER_QUOTA, FOREIGN = 0, 1, 2

---------------------------------------------------------------------------------------------------
-- Reading and validating

local function natural(number)
  return min(max(number, 0), NUMBER_MAX)
end

local function within(number)
  return min(max(number, -NUMBER_MAX), NUMBER_MAX)
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
-- Computing: a bucket

-- `level` after `rate` has flowed in for `micros`, at most `cap`.
local function flow(level, rate, micros, cap)
  return min(level + rate * micros, cap)
end

local function new_bucket(entry, lane, now_us)
  local rate, burst = entry.rate, entry.burst
  local level = burst
  if lane.lost_us > 0 and burst <= rate * EMPTY_AFTER_LOSS_US then
    level = flow(0, rate, now_us - lane.lost_us, burst)
  end
  return {
    rate = rate, token = entry.token, burst = burst, version = entry.version,
    epoch_us = entry.epoch_us, level = level, stamp_us = now_us,
    epoch = floor(now_us / entry.epoch_us),
    leased0 = 0, leased1 = 0, depth0 = 0, depth1 = 0, lent0 = 0, lent1 = 0,
    demand0 = 0, demand1 = 0, charged = 0, forgiven = 0, central = level,
  }
end

-- The stretch in which nothing flows in because all nodes were cut off.
local function frozen(bucket, lane)
  if lane.gap_until_us <= bucket.stamp_us then
    return 0, 0
  end
  local from
  if bucket.stamp_us > lane.gap_from_us then
    from = bucket.stamp_us
  elseif bucket.leased0 + bucket.leased1 + bucket.depth0 + bucket.depth1 > 0 then
    -- The holders lived on their leases first: what they did not hold is lost, so that nobody
    -- finds it beside what the policies let pass.
    from = lane.gap_from_us
  else
    from = lane.gap_from_us + lane.gap_silence_us
  end
  return from, lane.gap_until_us
end

-- The highest level beside leases of `depth` tokens.
local function cap_of(bucket, depth)
  return max(bucket.burst - depth * bucket.token, 0)
end

-- Takes `units` from the central level.
local function drain(bucket, units)
  bucket.central = max(bucket.central - units, -NUMBER_MAX)
end

-- What was lent counts as spent; what was spent ahead is owed.
local function forget(bucket, lent)
  drain(bucket, max(lent, 0))
  bucket.level = max(bucket.level + min(lent, 0), -NUMBER_MAX)
end

-- Ends all leases but those of the last `alive` epochs.
local function end_leases(bucket, alive)
  if alive < 1 then
    forget(bucket, bucket.lent0)
    bucket.lent0 = 0
  end
  if alive < 2 then
    forget(bucket, bucket.lent1)
    bucket.lent1 = 0
  end
end

-- Lets the time from `at_us` to `until_us` pass beside the leases of the last `alive` epochs.
local function stretch(bucket, at_us, until_us, alive, frozen_from, frozen_until)
  if until_us <= at_us then
    return at_us
  end
  local passed_us = until_us - at_us
  local still = max(min(until_us, frozen_until) - max(at_us, frozen_from), 0)
  end_leases(bucket, alive)
  local leased, depth = 0, 0
  if alive >= 1 then
    bucket.lent0 = flow(bucket.lent0, bucket.leased0, passed_us, NUMBER_MAX)
    leased, depth = bucket.leased0, bucket.depth0
  end
  if alive == 2 then
    bucket.lent1 = flow(bucket.lent1, bucket.leased1, passed_us, NUMBER_MAX)
    leased, depth = leased + bucket.leased1, depth + bucket.depth1
  end
  local free = max(bucket.rate - leased, 0)
  bucket.level = flow(bucket.level, free, passed_us - still, cap_of(bucket, depth))
  bucket.central = flow(bucket.central, bucket.rate, passed_us - still, bucket.burst)
  return until_us
end

-- Moves the sums of the last two epochs on to `epoch`.
local function turn(bucket, epoch)
  if epoch > bucket.epoch then
    local kept = epoch == bucket.epoch + 1
    end_leases(bucket, kept and 1 or 0)
    bucket.leased0, bucket.leased1 = 0, kept and bucket.leased0 or 0
    bucket.depth0, bucket.depth1 = 0, kept and bucket.depth0 or 0
    bucket.lent0, bucket.lent1 = 0, kept and bucket.lent0 or 0
    bucket.demand0, bucket.demand1 = 0, kept and bucket.demand0 or 0
  end
  bucket.epoch = epoch
end

-- Brings the level to `now_us`, ending leases whose epochs are over on the way.
local function refill(bucket, lane, now_us)
  now_us = max(now_us, bucket.stamp_us)
  local from, till = frozen(bucket, lane)
  local first_us = min((bucket.epoch + 1) * bucket.epoch_us, now_us)
  local second_us = min((bucket.epoch + 2) * bucket.epoch_us, now_us)
  local at_us = stretch(bucket, bucket.stamp_us, first_us, 2, from, till)
  at_us = stretch(bucket, at_us, second_us, 1, from, till)
  stretch(bucket, at_us, now_us, 0, from, till)
  turn(bucket, floor(now_us / bucket.epoch_us))
  bucket.stamp_us = now_us
end

-- Moves the bucket to a newer definition of its limit; leases of the old one count until they end.
local function adopt(bucket, entry)
  local ratio = entry.token / bucket.token
  local function scaled(rate)
    return min(ceil(rate * ratio), NUMBER_MAX)
  end
  local function level(units)
    return max(min(floor(units * ratio), entry.burst), -NUMBER_MAX)
  end
  bucket.level, bucket.central = level(bucket.level), level(bucket.central)
  bucket.leased0, bucket.leased1 = scaled(bucket.leased0), scaled(bucket.leased1)
  bucket.lent0, bucket.lent1 = within(scaled(bucket.lent0)), within(scaled(bucket.lent1))
  bucket.demand0, bucket.demand1 = scaled(bucket.demand0), scaled(bucket.demand1)
  bucket.rate, bucket.token, bucket.burst = entry.rate, entry.token, entry.burst
  bucket.version = entry.version
end

-- Adds to a sum of leases or demands.
local function raised(sum, by)
  return min(sum + by, NUMBER_MAX)
end

local function lowered(sum, by)
  return max(sum - by, 0)
end

-- Takes what the node held, `lent` units with `rate` among it, out of the epoch in which it was
-- registered: 0 is the current one.
local function unregister(bucket, entry, rate, lent, age)
  local depth = entry.held_depth + entry.back_depth
  if age == 0 then
    bucket.leased0 = lowered(bucket.leased0, rate)
    bucket.depth0 = lowered(bucket.depth0, depth)
    bucket.lent0 = within(bucket.lent0 - lent)
    bucket.demand0 = lowered(bucket.demand0, entry.held_demand)
  else
    bucket.leased1 = lowered(bucket.leased1, rate)
    bucket.depth1 = lowered(bucket.depth1, depth)
    bucket.lent1 = within(bucket.lent1 - lent)
    bucket.demand1 = lowered(bucket.demand1, entry.held_demand)
  end
end

-- The least that may be lent to a node with a lease of `rate`: what it has spent ahead is less than
-- nothing, until the lease ends.
local function lent_least(rate, token)
  return rate > 0 and -min(token * CREDIT_TOKENS, NUMBER_MAX) or 0
end

-- Moves what the node holds to the current epoch, less what it spent and gives back. What was lent
-- to it under a lease that has ended counts as spent already. Tells whether it has ended.
local function renew(bucket, entry, restore)
  local age = bucket.epoch - entry.held_tag
  local current = age == 0 or age == 1
  if current then
    local rate = entry.held_rate + entry.back_rate
    local passed_us = entry.restore and 0 or max(bucket.stamp_us - entry.held_stamp_us, 0)
    local lent = flow(entry.held_lent, rate, passed_us, NUMBER_MAX)
    if not restore then
      unregister(bucket, entry, rate, lent, age)
    end
    local spent = min(entry.spent * bucket.token, NUMBER_MAX)
    bucket.leased0 = raised(bucket.leased0, entry.held_rate)
    bucket.depth0 = raised(bucket.depth0, entry.held_depth)
    local left = max(lent - spent - entry.back_units - entry.lost, -NUMBER_MAX)
    local kept = max(left, lent_least(entry.held_rate, bucket.token))
    bucket.lent0 = within(bucket.lent0 + kept)
    drain(bucket, spent)
    bucket.level = min(bucket.level + entry.back_units, NUMBER_MAX) + (left - kept)
  end
  bucket.demand0 = raised(bucket.demand0, entry.demand)
  return not current and (entry.held_rate > 0 or entry.held_depth > 0 or entry.held_lent ~= 0)
end

-- Charges what was spent on credit, and brings the level within its limits.
local function charge(bucket, entry, nodes)
  local spent = entry.spent + entry.debt + entry.allowed
  bucket.charged = min(bucket.charged + spent, SUM_MAX)
  local debt = min(entry.debt * bucket.token, NUMBER_MAX)
  drain(bucket, debt)
  local found = bucket.central - bucket.lent0 - bucket.lent1
  local cap = cap_of(bucket, bucket.depth0 + bucket.depth1)
  local level = min(max(bucket.level - debt, found), cap)
  -- What all nodes may spend on credit is never forgiven: they would have it twice.
  local credit = min(nodes * CREDIT_TOKENS * bucket.token, NUMBER_MAX)
  local lowest = -max(bucket.burst, bucket.rate * DEBT_US, credit)
  if level < lowest then
    bucket.forgiven = min(bucket.forgiven + (lowest - level), SUM_MAX)
    level = lowest
  end
  bucket.level = level
end

-- Takes tokens out of the bucket for the node.
local function give_tokens(bucket, entry, share, nodes)
  if bucket.level <= 0 then
    return 0
  end
  local needed = min(entry.needed, floor(bucket.level / bucket.token))
  bucket.level = bucket.level - needed * bucket.token
  local part = floor(bucket.level * (share / 2 + 0.5 / nodes))
  local least = bucket.level >= bucket.token and 1 or 0
  local tokens = min(entry.want, max(floor(part / bucket.token), least))
  bucket.level = bucket.level - tokens * bucket.token
  return needed + tokens
end

-- The refill that is kept from leases so that debt is repaid: soon, but no more than the debt needs.
local function repayment_of(bucket)
  local wanted = max(floor(-bucket.level / REPAY_US), floor(bucket.rate / REPAY_LEAST_PART))
  return min(wanted, floor(bucket.rate / 2))
end

-- The refill that the store would like back.
local function recall_of(bucket, held_rate, target, leased, most, pressing)
  if bucket.level > floor(bucket.burst / 10) and not pressing then
    return held_rate
  end
  local above, repay = held_rate - target, 0
  if above <= floor(target / 4) then
    above = 0
  end
  if bucket.level < 0 and leased > most then
    repay = ceil(held_rate * ((leased - most) / leased))
  end
  return min(max(above, repay), held_rate)
end

-- The depth that goes with a leased refill, on top of `tokens`.
local function extra_depth(bucket, share, held_depth, tokens)
  local capacity = floor(bucket.burst / bucket.token)
  local room = min(max(floor(capacity * share / 2), 2), capacity)
  local free = floor((bucket.burst - bucket.level) / bucket.token)
    - bucket.depth0 - bucket.depth1 - tokens
  return max(min(room - held_depth - tokens, free), 0)
end

-- The most refill that the node should hold.
local function target_of(bucket, entry, share, lane, nodes, now_us)
  local target = min(entry.want_rate, floor(bucket.rate * share))
  if now_us < lane.gap_until_us then
    target = min(target, floor(bucket.rate / nodes))
  end
  return target
end

local function grant(bucket, entry, void, lane, nodes, now_us)
  local giving = now_us >= lane.recovering_until_us
  local held_rate = void and 0 or entry.held_rate
  local held_depth = void and 0 or entry.held_depth
  local demand = bucket.demand0 + bucket.demand1
  local share = demand > 0 and entry.demand / demand or 0

  local tokens = giving and give_tokens(bucket, entry, share, nodes) or 0
  local target = target_of(bucket, entry, share, lane, nodes, now_us)
  local leased = bucket.leased0 + bucket.leased1
  -- While refill is frozen no debt is repaid, however little is leased.
  local repaying = bucket.level < 0 and now_us >= lane.gap_until_us
  local most = repaying and bucket.rate - repayment_of(bucket) or bucket.rate
  local depth, added = tokens, 0
  local pressing = now_us < lane.gap_until_us or demand > bucket.rate + floor(bucket.rate / 4)
  if giving and (pressing or bucket.level < floor(bucket.burst / 20)) then
    added = max(min(target - held_rate, most - leased), 0)
    if held_rate + added > 0 then
      depth = depth + extra_depth(bucket, share, held_depth, tokens)
    end
  end
  local recall = recall_of(bucket, held_rate, target, leased, most, pressing)
  bucket.leased0 = bucket.leased0 + added
  bucket.depth0 = raised(bucket.depth0, depth)
  bucket.lent0 = within(bucket.lent0 + tokens * bucket.token)
  local life_us = (bucket.epoch + 2) * bucket.epoch_us - now_us
  return pack(GRANT_FORMAT, GIVEN, tokens, added, depth, bucket.stamp_us, bucket.epoch, life_us,
    bucket.level, leased + added, recall, void and 1 or 0)
end

-- Applies one entry to its bucket and answers it.
local function apply(bucket, entry, fresh, lane, nodes, now_us)
  refill(bucket, lane, now_us)
  if entry.epoch_us ~= bucket.epoch_us and bucket.leased0 + bucket.leased1 == 0
    and bucket.depth0 + bucket.depth1 == 0 and bucket.lent0 == 0 and bucket.lent1 == 0
    and bucket.demand0 + bucket.demand1 == 0 then
    bucket.epoch_us = entry.epoch_us
    bucket.epoch = floor(now_us / entry.epoch_us)
  end
  local restore = fresh or entry.restore
  if restore and entry.claim then
    bucket.level = min(bucket.level, entry.claim)
    bucket.central = min(bucket.central, bucket.level + bucket.lent0 + bucket.lent1)
  end
  local void = renew(bucket, entry, restore)
  charge(bucket, entry, nodes)
  return grant(bucket, entry, void, lane, nodes, now_us)
end

-- Milliseconds until the bucket may be forgotten: full, and all leases ended.
local function keep_ms_of(bucket)
  local fill_us = ceil(max(bucket.burst - bucket.level, 0) / bucket.rate)
  return floor((fill_us + 2 * bucket.epoch_us) / 1000) + BUCKET_MARGIN_MS
end

---------------------------------------------------------------------------------------------------
-- Computing: a batch

-- Answers one entry; a bucket that changed is marked to be written.
local function answer(name, entry, buckets, changed, lane, nodes, now_us)
  local bucket = buckets[name]
  if bucket == false then
    return pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
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
      0, 0, 0, 0, 0, 0)
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
