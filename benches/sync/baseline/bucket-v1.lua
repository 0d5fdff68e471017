-- bucket-v1: what the entries of a batch do to their buckets, and what their node is given.
--
-- The first half of the script whose keys, arguments and reply sync-v1.lua documents: the two files
-- are sent as one, this one first.
--
-- Each key pays for each step of `apply_all`: a step of Lua costs about as much as 20 of C, a number
-- read or written as much as 5 of Lua, and each byte of a string is hashed when it is made. So the
-- loop keeps its numbers in local variables and writes comparisons where min and max would read
-- better; what a sync seldom changes is seldom written; and what seldom happens (a new bucket, the
-- end of an epoch, an outage, a new quota) stands in functions of its own.
--
-- 2^52 is NUMBER_MAX of src/sync/message.rs, and 2^53 SUM_MAX of src/store/model.rs: written out,
-- they are constants to Lua.

local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local pack, unpack_numbers = struct.pack, struct.unpack
local call = redis.call

-- Numbers that are needed as strings are written as such: Lua takes a microsecond to print one.
local WIRE_VERSION = 1
local MAGIC_LETTER, MAGIC = 'T', 'T1'
local ENTRIES_MAX = 250

-- As in src/store/model.rs, where each is explained.
local LANE_KEEP_MS = 24 * 3600 * 1000
local BUCKET_MARGIN_MS, BUCKET_MARGIN_LEAST_MS = 60000, 30000
local EMPTY_AFTER_LOSS_US = 60000000
local DEBT_US = 1000000
local CREDIT_TOKENS = 15
local REPAY_US, REPAY_LEAST_PART = 100000, 16
local DOUBTFUL_US = 600000000
local MARK_US = 250000

-- A quota stands in a batch as it stands at the head of a bucket's record.
local QUOTA_FORMAT, QUOTA_BYTES = '<ddddd', #MAGIC + 5 * 8
local ENTRY_FORMAT, ENTRY_BYTES = '<BBdddddddddddd', 2 + 12 * 8
local REST_FORMAT, REST_BYTES = '<dddddd', 6 * 8
-- A record: the quota; what changes with the epochs; what changes with each sync.
local BUCKET_FORMAT, BUCKET_BYTES = '<c42dddddddddddddd', QUOTA_BYTES + 14 * 8
-- Redis uses the memory of a call's arguments of 64 bytes and less again: a tail is one. It begins at
-- QUOTA_BYTES + 6 * 8.
local TAIL_FORMAT, TAIL_AT, WHOLE_AT = '<dddddddd', '90', '0'
local GRANT_FORMAT, TIMED_GRANT_FORMAT = '<Bddddddd', '<Bdddddddddd'

-- Flags of an entry: 1 registers anew, 2 has a claim, 4 is followed by its rest.
local RESTORE, CLAIM, REST = 1, 2, 4
-- What a grant says; TIMED is added where its times are not those of the batch.
local GIVEN, OTHER_QUOTA, FOREIGN, GIVEN_VOID, TIMED = 0, 1, 2, 3, 4

-- What holds for the whole batch; sync-v1.lua sets it before the first entry.
local batch, now_us, time_ms, nodes
local gap_from_us, gap_silence_us, gap_until_us, recovering_until_us, lost_us

---------------------------------------------------------------------------------------------------
-- What seldom happens

-- The record of a bucket that is not in the store.
local function first_record(quota, rate, burst)
  local level = burst
  if lost_us > 0 and burst <= rate * EMPTY_AFTER_LOSS_US then
    level = min(rate * (now_us - lost_us), burst)
  end
  return pack(BUCKET_FORMAT, quota, 0, 0, 0, 0, 0, 0, now_us, level, level, 0, 0, 0, 0, 0)
end

-- The record of a key that comes more than once in a batch: what the entries before `index` made of
-- what was `found`.
local function record_now(name, index, found, records, places)
  for earlier = 1, index - 1 do
    local record = records[earlier]
    if record and KEYS[3 + earlier] == name then
      local is_tail = places[earlier] == TAIL_AT
      found = is_tail and found:sub(1, tonumber(TAIL_AT)) .. record or record
    end
  end
  return found
end

-- Ends a lease: what was lent counts as spent; what was spent ahead is owed.
local function forget(level, central, lent)
  if lent > 0 then
    return level, max(central - lent, -2^52)
  end
  return max(level + lent, -2^52), central
end

-- The stretch in which nothing flows in because all nodes were cut off, where it is not over.
local function frozen(stamp_us, is_leased)
  if stamp_us > gap_from_us then
    return stamp_us, gap_until_us
  elseif is_leased then
    -- The holders lived on their leases first: what they did not hold is lost, so that nobody
    -- finds it beside what the policies let pass.
    return gap_from_us, gap_until_us
  end
  return gap_from_us + gap_silence_us, gap_until_us
end

-- Brings a bucket from `stamp_us` to now, ending leases whose epochs are over on the way.
local function pass_time(rate, token, burst, epoch_us, stamp_us, level, central,
    leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1)
  local until_us, from_us, till_us = now_us, 0, 0
  if until_us < stamp_us then until_us = stamp_us end
  if gap_until_us > stamp_us then
    from_us, till_us = frozen(stamp_us, leased0 + leased1 + depth0 + depth1 > 0)
  end
  local epoch, at_us = floor(stamp_us / epoch_us), stamp_us
  for alive = 2, 0, -1 do
    local ends_us = (epoch + 3 - alive) * epoch_us
    if alive == 0 or ends_us > until_us then ends_us = until_us end
    if ends_us > at_us then
      local passed_us = ends_us - at_us
      local flowing_us, free, depth = passed_us, rate, 0
      if till_us > at_us then
        flowing_us = passed_us - max(min(ends_us, till_us) - max(at_us, from_us), 0)
      end
      if alive >= 1 then
        lent0 = lent0 + leased0 * passed_us
        if lent0 > 2^52 then lent0 = 2^52 end
        free, depth = free - leased0, depth0
      elseif lent0 ~= 0 then
        level, central = forget(level, central, lent0)
        lent0 = 0
      end
      if alive == 2 then
        lent1 = lent1 + leased1 * passed_us
        if lent1 > 2^52 then lent1 = 2^52 end
        free, depth = free - leased1, depth + depth1
      elseif lent1 ~= 0 then
        level, central = forget(level, central, lent1)
        lent1 = 0
      end
      local cap = burst - depth * token
      if cap < 0 then cap = 0 end
      if free > 0 then level = level + free * flowing_us end
      if level > cap then level = cap end
      central = central + rate * flowing_us
      if central > burst then central = burst end
      at_us = ends_us
    end
  end
  local turned = floor(until_us / epoch_us) - epoch
  if turned > 1 then
    if lent0 ~= 0 then level, central = forget(level, central, lent0) end
    leased0, depth0, lent0, demand0 = 0, 0, 0, 0
  end
  if turned > 0 then
    if lent1 ~= 0 then level, central = forget(level, central, lent1) end
    leased0, leased1, depth0, depth1 = 0, leased0, 0, depth0
    lent0, lent1, demand0, demand1 = 0, lent0, 0, demand0
  end
  return until_us, level, central,
    leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1
end

-- Whether a record of a bucket's length is one: no other program's numbers mean anything.
local function is_ours(own, rate, token, burst, version, epoch_us, stamp_us, level)
  local least = min(rate, token, burst, epoch_us)
  local most = max(rate, token, burst, epoch_us, version, stamp_us, level, -level)
  local parts = rate % 1 + token % 1 + burst % 1 + epoch_us % 1 + version % 1
  return own:sub(1, #MAGIC) == MAGIC and parts == 0 and least >= 1 and version >= 0 and most <= 2^53
end

-- Moves a bucket to a newer definition of its limit; leases of the old one count until they end.
local function adopt(ratio, burst, stamp_us, level, central,
    leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1)
  level = max(min(floor(level * ratio), burst), -2^52)
  central = max(min(floor(central * ratio), burst), -2^52)
  leased0, leased1 = min(ceil(leased0 * ratio), 2^52), min(ceil(leased1 * ratio), 2^52)
  lent0 = max(min(ceil(lent0 * ratio), 2^52), -2^52)
  lent1 = max(min(ceil(lent1 * ratio), 2^52), -2^52)
  demand0, demand1 = min(ceil(demand0 * ratio), 2^52), min(ceil(demand1 * ratio), 2^52)
  return stamp_us, level, central,
    leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1
end

-- Debt beyond this is written off. What all nodes may spend on credit is never forgiven: they
-- would have it twice.
local function lowest_level(rate, token, burst)
  return -max(burst, rate * DEBT_US, min(nodes * CREDIT_TOKENS * token, 2^52))
end

-- The refill that is kept from leases so that debt is repaid: soon, but no more than the debt needs.
local function repayment_of(rate, level)
  return min(max(floor(-level / REPAY_US), floor(rate / REPAY_LEAST_PART)), floor(rate / 2))
end

-- The quotas of the batch, each with its bytes and with what follows from it: the demand that is
-- pressing, and the levels below which refill is leased and above which it is wanted back.
local function read_quotas(at, count)
  local quotas = {}
  for number = 1, count do
    local bytes = batch:sub(at, at + QUOTA_BYTES - 1)
    local rate, token, burst, version, epoch_us = unpack_numbers(QUOTA_FORMAT, bytes, #MAGIC + 1)
    quotas[number] = { bytes, rate, token, burst, version, epoch_us,
      rate + floor(rate / 4), floor(burst / 20), floor(burst / 10), floor(burst / token) }
    at = at + QUOTA_BYTES
  end
  return quotas, at
end

---------------------------------------------------------------------------------------------------
-- All entries

-- Applies the entries that begin at `at` to the buckets that were `found`, and puts the grants into
-- `parts`, after what is there. Returns what is to be written: the records (false: nothing), where
-- each goes (an offset as a string, or as a number for how many milliseconds it is to be kept from
-- now on), and the longest of these times. Nil if an entry names a quota that the batch does not have.
--
-- The order of steps is that of Key::apply in src/store/model.rs.
local function apply_all(at, count, quotas, found, parts)
  local batch, now_us, gap_until_us = batch, now_us, gap_until_us
  local giving, returning = now_us >= recovering_until_us, now_us < gap_until_us
  local even_share = 0.5 / nodes
  local kept_from_ms, parts_before = time_ms + BUCKET_MARGIN_LEAST_MS, #parts
  local records, places, seen, longest_ms = {}, {}, {}, 0

  local terms, quota, rate, token, burst, version, wanted_epoch_us, busy_demand, low_level,
    high_level, capacity, epoch_now, flowing_from_us

  for index = 1, count do
    local number, flags, spent, held_rate, held_depth, held_lent, held_stamp_us, held_demand,
      held_tag, wanted_demand, want, want_rate, lost, claim, next_at =
      unpack_numbers(ENTRY_FORMAT, batch, at)
    local debt, allowed, back_units, back_rate, back_depth, needed = 0, 0, 0, 0, 0, 0
    local restoring, anew, refusal, status, whole_changed = false, false, nil, GIVEN, false
    at = next_at
    if flags ~= CLAIM then
      restoring = flags % 2 >= RESTORE
      if flags >= REST then
        debt, allowed, back_units, back_rate, back_depth, needed, at =
          unpack_numbers(REST_FORMAT, batch, at)
      end
      anew = restoring
    end
    if quotas[number] ~= terms then
      terms = quotas[number]
      if not terms then
        return nil
      end
      quota, rate, token, burst, version, wanted_epoch_us, busy_demand, low_level, high_level,
        capacity = unpack(terms)
      epoch_now = floor(now_us / wanted_epoch_us)
      flowing_from_us = max(epoch_now * wanted_epoch_us, gap_until_us)
    end

    -- The bucket.
    local name, record = KEYS[3 + index], found[1 + index]
    if seen[name] then
      record = record_now(name, index, record, records, places)
    end
    seen[name] = true
    if not record then
      -- MGET passes over other types in silence; nothing of ours is empty.
      record = call('TYPE', name).ok ~= 'none' and '' or first_record(quota, rate, burst)
      anew, whole_changed = true, true
    end
    if #record ~= BUCKET_BYTES then
      -- The rest is computed for nothing, and thrown away.
      refusal = pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0)
      record = first_record(quota, rate, burst)
    end
    local own, until_ms, forgiven, leased1, depth1, lent1, demand1, stamp_us, level, central,
      charged, leased0, depth0, lent0, demand0 = unpack_numbers(BUCKET_FORMAT, record)
    local epoch, epoch_us = epoch_now, wanted_epoch_us

    -- The time that has passed: mostly within one epoch, under the same quota, with no outage.
    local passed_us = now_us - stamp_us
    if own == quota and passed_us > 0 and stamp_us >= flowing_from_us then
      lent0 = lent0 + leased0 * passed_us
      if lent0 > 2^52 then lent0 = 2^52 end
      if leased1 > 0 then
        lent1, whole_changed = lent1 + leased1 * passed_us, true
        if lent1 > 2^52 then lent1 = 2^52 end
      end
      local free = rate - leased0 - leased1
      if free > 0 then level = level + free * passed_us end
      local cap = burst - (depth0 + depth1) * token
      if cap < 0 then cap = 0 end
      if level > cap then level = cap end
      central = central + rate * passed_us
      if central > burst then central = burst end
      stamp_us = now_us
    else
      local own_rate, own_token, own_burst, own_version = rate, token, burst, version
      whole_changed = true
      if own ~= quota then
        own_rate, own_token, own_burst, own_version, epoch_us =
          unpack_numbers(QUOTA_FORMAT, own, #MAGIC + 1)
        if not is_ours(own, own_rate, own_token, own_burst, own_version, epoch_us, stamp_us, level) then
          refusal = pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0)
        elseif own_version > version or own_version == version
          and (own_rate ~= rate or own_token ~= token or own_burst ~= burst) then
          refusal = pack(GRANT_FORMAT, OTHER_QUOTA, own_version, own_rate, own_token, own_burst,
            0, 0, 0)
        end
      end
      stamp_us, level, central,
        leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1 =
        pass_time(own_rate, own_token, own_burst, epoch_us, stamp_us, level, central,
          leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1)
      if own_version < version then
        stamp_us, level, central,
          leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1 =
          adopt(token / own_token, burst, stamp_us, level, central,
            leased0, leased1, depth0, depth1, lent0, lent1, demand0, demand1)
      end
      if leased0 + leased1 == 0 and depth0 + depth1 == 0 and lent0 == 0 and lent1 == 0
        and demand0 + demand1 == 0 then
        epoch_us = wanted_epoch_us
      end
      epoch = floor(stamp_us / epoch_us)
      own = quota
      if epoch_us ~= wanted_epoch_us then
        own = MAGIC .. pack(QUOTA_FORMAT, rate, token, burst, version, epoch_us)
      end
    end
    if anew and flags % 4 >= CLAIM then
      level = min(level, claim)
      central = max(min(central, level + lent0 + lent1), -2^52)
    end

    -- What the node holds moves to the current epoch, less what it spent and gives back. What was
    -- lent to it under a lease that has ended counts as spent already.
    local age = epoch - held_tag
    if age == 0 or age == 1 then
      local rate_before = held_rate + back_rate
      local lent = held_lent
      if stamp_us > held_stamp_us and not restoring then
        lent = lent + rate_before * (stamp_us - held_stamp_us)
        if lent > 2^52 then lent = 2^52 end
      end
      if anew then
        -- Nothing of it is registered.
      elseif age == 0 then
        leased0 = leased0 - rate_before
        if leased0 < 0 then leased0 = 0 end
        depth0 = depth0 - held_depth - back_depth
        if depth0 < 0 then depth0 = 0 end
        demand0 = demand0 - held_demand
        if demand0 < 0 then demand0 = 0 end
        lent0 = lent0 - lent
        if lent0 < -2^52 then lent0 = -2^52 elseif lent0 > 2^52 then lent0 = 2^52 end
      else
        whole_changed = true
        leased1 = max(leased1 - rate_before, 0)
        depth1 = max(depth1 - held_depth - back_depth, 0)
        demand1 = max(demand1 - held_demand, 0)
        lent1 = min(max(lent1 - lent, -2^52), 2^52)
      end
      local units = spent * token
      if units > 2^52 then units = 2^52 end
      local left = lent - units - back_units - lost
      if left < 0 then
        -- What the node has spent ahead is less than nothing, until its lease ends.
        left = max(left, -2^52)
        local kept = max(left, held_rate > 0 and -min(token * CREDIT_TOKENS, 2^52) or 0)
        lent0 = lent0 + kept
        left = left - kept
      else
        lent0 = lent0 + left
        left = 0
      end
      if lent0 < -2^52 then lent0 = -2^52 elseif lent0 > 2^52 then lent0 = 2^52 end
      leased0 = leased0 + held_rate
      if leased0 > 2^52 then leased0 = 2^52 end
      depth0 = depth0 + held_depth
      if depth0 > 2^52 then depth0 = 2^52 end
      central = central - units
      if central < -2^52 then central = -2^52 end
      level = level + back_units
      if level > 2^52 then level = 2^52 end
      level = level + left
    elseif held_rate + back_rate > 0 or held_depth + back_depth > 0 or held_lent ~= 0 then
      status, held_rate, held_depth = GIVEN_VOID, 0, 0
    end
    demand0 = demand0 + wanted_demand
    if demand0 > 2^52 then demand0 = 2^52 end

    -- What was spent on credit is charged, and the level comes within its limits.
    charged = charged + (spent + debt + allowed)
    if charged > 2^53 then charged = 2^53 end
    if debt > 0 then
      debt = min(debt * token, 2^52)
      level, central = level - debt, max(central - debt, -2^52)
    end
    local depths = depth0 + depth1
    local found_level, cap = central - lent0 - lent1, burst - depths * token
    if level < found_level then level = found_level end
    if cap < 0 then cap = 0 end
    if level > cap then level = cap end

    -- Tokens out of the bucket: first what callers wait for, then half of the rest by share and
    -- half spread evenly, and one at least while there is one.
    local demand, share, tokens, most = demand0 + demand1, 0, 0, rate
    if demand > 0 then share = wanted_demand / demand end
    if level > 0 then
      if giving then
        if needed > 0 then
          tokens = min(needed, floor(level / token))
          level = level - tokens * token
        end
        if want > 0 then
          local part = level * (share / 2 + even_share)
          part = (part - part % 1) / token
          part = part - part % 1
          if part < 1 and level >= token then part = 1 end
          if part > want then part = want end
          level = level - part * token
          tokens = tokens + part
        end
      end
    elseif level < 0 then
      local lowest = lowest_level(rate, token, burst)
      if level < lowest then
        forgiven, whole_changed = min(forgiven + (lowest - level), 2^53), true
        level = lowest
      end
      -- While refill is frozen no debt is repaid, however little is leased.
      if not returning then most = rate - repayment_of(rate, level) end
    end

    -- Refill, while tokens are few; and what of it the store would like back.
    local leased, depth, added, recall = leased0 + leased1, tokens, 0, held_rate
    local pressing = returning or demand > busy_demand
    if pressing or level <= high_level then
      local target = rate * share
      target = target - target % 1
      if target > want_rate then target = want_rate end
      -- The others still live on their shares, or have just come back from them.
      if returning then target = min(target, floor(rate / nodes)) end
      if giving and (pressing or level < low_level) then
        added = target - held_rate
        if added > most - leased then added = most - leased end
        if added < 0 then added = 0 end
        if held_rate + added > 0 then
          -- The depth that goes with it, on top of the tokens.
          local room, free = capacity * share / 2, (burst - level) / token
          room = room - room % 1
          if room < 2 then room = 2 end
          if room > capacity then room = capacity end
          room = room - held_depth - tokens
          free = free - free % 1 - depths - tokens
          if room > free then room = free end
          if room > 0 then depth = depth + room end
        end
      end
      local above, repay, slack = held_rate - target, 0, target / 4
      if above <= slack - slack % 1 then above = 0 end
      if level < 0 and leased > most then
        repay = ceil(held_rate * ((leased - most) / leased))
      end
      if above < repay then above = repay end
      if recall > above then recall = above end
    end
    leased0 = leased0 + added
    depth0 = depth0 + depth
    if depth0 > 2^52 then depth0 = 2^52 end
    lent0 = lent0 + tokens * token
    if lent0 > 2^52 then lent0 = 2^52 end
    local whole = level + lent0 + lent1
    if whole > 2^53 then whole = 2^53 elseif whole < -2^53 then whole = -2^53 end

    if refusal then
      parts[parts_before + index], records[index], places[index] = refusal, false, false
    else
      if stamp_us == now_us and epoch_us == wanted_epoch_us then
        parts[parts_before + index] = pack(GRANT_FORMAT, status, tokens, added, depth, level, whole,
          leased + added, recall)
      else
        parts[parts_before + index] = pack(TIMED_GRANT_FORMAT, status + TIMED, tokens, added, depth,
          level, whole, leased + added, recall,
          stamp_us, epoch, (epoch + 2) * epoch_us - now_us)
      end
      -- A bucket may be forgotten when it is full and all its leases have ended, and a little
      -- later. Its expiry is moved only when it has come near.
      local spare_us = (until_ms - kept_from_ms) * 1000 - 2 * epoch_us
      local place = TAIL_AT
      if spare_us < 0 or burst - level > spare_us * rate then
        local fill_us = ceil((burst - level) / rate)
        local keep_ms = floor((fill_us + 2 * epoch_us) / 1000) + BUCKET_MARGIN_MS
        longest_ms = max(longest_ms, keep_ms)
        until_ms, whole_changed, place = time_ms + keep_ms, true, keep_ms
      elseif whole_changed then
        place = WHOLE_AT
      end
      if whole_changed then
        record = pack(BUCKET_FORMAT, own, until_ms, forgiven, leased1, depth1, lent1, demand1,
          stamp_us, level, central, charged, leased0, depth0, lent0, demand0)
      else
        record = pack(TAIL_FORMAT,
          stamp_us, level, central, charged, leased0, depth0, lent0, demand0)
      end
      records[index], places[index] = record, place
    end
  end
  return records, places, longest_ms
end
