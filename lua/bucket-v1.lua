-- bucket-v1: what one entry of a batch does to one bucket, and what its node is given.
--
-- The first half of the script whose keys, arguments and reply sync-v1.lua documents: the two files
-- are sent as one, this one first.

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
local GRANT_FORMAT = numbers(12)
local NUMBER_FORMAT = numbers(1)

local LANE_BYTES = #MAGIC + 8 * 8 + INCARNATION_BYTES
local NODE_HEAD_BYTES = #MAGIC + 8 + HASH_BYTES + INCARNATION_BYTES
local BUCKET_BYTES = #MAGIC + 19 * 8

local APPLIED, REBORN, STALE, CLONED, LANES, WIRE = 0, 1, 2, 3, 4, 5
local GIVEN, OTHER_QUOTA, FOREIGN = 0, 1, 2

local function within(number)
  return min(max(number, -NUMBER_MAX), NUMBER_MAX)
end

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
  return not current and (entry.held_rate + entry.back_rate > 0
    or entry.held_depth + entry.back_depth > 0 or entry.held_lent ~= 0)
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
  local whole = min(max(bucket.level + bucket.lent0 + bucket.lent1, -SUM_MAX), SUM_MAX)
  return pack(GRANT_FORMAT, GIVEN, tokens, added, depth, bucket.stamp_us, bucket.epoch, life_us,
    bucket.level, whole, leased + added, recall, void and 1 or 0)
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

