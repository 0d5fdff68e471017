-- bucket-v2: what the entries of a batch do to their buckets, and what their node is given.
--
-- The first half of the script whose keys, arguments and reply sync-v2.lua documents: the two files
-- are sent as one, this one first.
--
-- A record is a ledger, which is the same for every algorithm, and the level of its curve: how it rises while
-- nobody spends. A token bucket's rises at the rate. A fixed window's is full again at the end of each window;
-- a sliding window's rises as what was charged in the window before counts less; a sliding log's as each charge
-- leaves, a window after the slot of time that it was made in. That of a calendar's window is full again at its end,
-- and nodes tell which window it is. The level
-- still has what is outstanding: what nodes hold, or have spent and not reported. Beside it stands what can
-- be leased, which may always rise to the level less what is outstanding, within the burst less the depths
-- leased out.
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

-- A function that is made costs a call more than most that it does, and so does each variable of the
-- script that a function uses. So there are two functions for a batch: all that seldom happens stands in
-- one that is run when it does, and numbers with a name stand in the function that uses them.

-- Curves, as quotas have them.
local FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG, CALENDAR_WINDOW = 2, 3, 4, 5
local WINDOW_LEAST_US = 1000

-- Numbers that are needed as strings are written as such: Lua takes a microsecond to print one.
local MAGIC = 'T2'

---------------------------------------------------------------------------------------------------
-- Sliding logs

-- Returns what is done with the slots of a log: pairs of a slot's number and the units charged in it, one after the
-- other, the oldest first; never more than a burst together. What was charged beyond a burst lowers the level only,
-- and takes its place among them as soon as earlier charges leave.
local function log_functions()
  local SLOTS, PAIR_BYTES = 64, 16
  local insert, remove = table.insert, table.remove

  local function slot_of(window_us, at_us) return floor(at_us / ceil(window_us / SLOTS)) end

  -- When the charges of a slot leave: a window after the slot's end.
  local function leaves_us(window_us, slot) return (slot + 1) * ceil(window_us / SLOTS) + window_us end

  local function sum_of(slots)
    local sum = 0
    for at = 2, #slots, 2 do sum = sum + slots[at] end
    return sum
  end

  local function add(slots, slot, units)
    local at = 1
    while slots[at] and slots[at] < slot do at = at + 2 end
    if slots[at] == slot then
      slots[at + 1] = slots[at + 1] + units
    else
      insert(slots, at, units)
      insert(slots, at, slot)
    end
  end

  -- Charges what `level` misses beyond what is charged already to the slot of `at_us`. Where it misses less, because
  -- debt was written off, the oldest charges go.
  local function settle(slots, burst, window_us, level, at_us)
    local sum = sum_of(slots)
    local beyond = burst - level - sum
    local room = min(beyond, burst - sum)
    if room > 0 then add(slots, slot_of(window_us, at_us), room) end
    local less = -beyond
    while less > 0 and slots[2] do
      local taken = min(less, slots[2])
      slots[2], less = slots[2] - taken, less - taken
      if slots[2] == 0 then
        remove(slots, 1)
        remove(slots, 1)
      end
    end
  end

  -- Lets charges leave until `until_us`, and returns the level then.
  local function pass(slots, burst, window_us, level, from_us, until_us)
    settle(slots, burst, window_us, level, from_us)
    local owed, last = burst - level - sum_of(slots), nil
    repeat
      last = nil
      while slots[1] and leaves_us(window_us, slots[1]) <= until_us do
        last = remove(slots, 1)
        remove(slots, 1)
      end
      local room = last and min(owed, burst - sum_of(slots)) or 0
      if room > 0 then
        owed = owed - room
        add(slots, slot_of(window_us, leaves_us(window_us, last)), room)
      end
    until not last
    return max(burst - sum_of(slots) - owed, -2^52)
  end

  -- Adds what `from` has, each slot as `slot_now` says and units as `units_now` says.
  local function moved(from, slot_now, units_now)
    local slots = {}
    for at = 1, #from, 2 do add(slots, slot_now(from[at]), units_now(from[at + 1])) end
    return slots
  end

  -- No charge is later than `now_us`: the lane's time went back.
  local function no_later_than(slots, window_us, now_us)
    local newest = slot_of(window_us, now_us)
    return moved(slots, function(slot) return min(slot, newest) end, function(units) return units end)
  end

  -- The same charges in the units and slots of another plan.
  local function convert(slots, ratio, old_window_us, window_us, now_us)
    return moved(slots, function(slot)
      return slot_of(window_us, min((slot + 1) * ceil(old_window_us / SLOTS) - 1, now_us))
    end, function(units) return max(min(ceil(units * ratio), 2^52), -2^52) end)
  end

  -- The slots at the end of a record, from `at` on. Without units: there to keep the record's length.
  local function read(record, at)
    local slots = {}
    while at + PAIR_BYTES - 1 <= #record do
      local slot, units = unpack_numbers('<dd', record, at)
      if units > 0 then
        slots[#slots + 1], slots[#slots + 2] = slot, units
      end
      at = at + PAIR_BYTES
    end
    return slots
  end

  local function written(slots)
    local parts = {}
    for at = 1, #slots, 2 do parts[#parts + 1] = pack('<dd', slots[at], slots[at + 1]) end
    return table.concat(parts)
  end

  return { sum_of = sum_of, settle = settle, pass = pass, no_later_than = no_later_than, convert = convert, read = read,
    written = written }
end

---------------------------------------------------------------------------------------------------
-- What seldom happens

-- Returns what is done for a new bucket, at the end of an epoch, after an outage, and for a new quota, given
-- what holds for the whole batch. `is_lost`: the lane gives nothing because it lost its memory.
-- `is_returning`: it keeps back what nodes may have taken while it was silent.
local function seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, most_nodes,
    from_us, since_us, missing)
  -- As in src/store/model.rs and src/store/model/key.rs, where each is explained.
  local EMPTY_AFTER_LOSS_US, REMEMBERED_US, DEBT_US, CREDIT_TOKENS = 60000000, 4000000, 1000000, 15
  local BUCKET_FORMAT, TROUBLE_FORMAT, TAIL_AT = '<c50dddddddddddddd', '<dddddd', '98'
  local log
  local function logs()
    log = log or log_functions()
    return log
  end

  -- The length of a window: a millisecond at least, whatever a node sends, so that few of them have to pass.
  local function window_of(rate, burst) return max(floor(burst / rate), WINDOW_LEAST_US) end

  -- Units that count at `at_us` of those that were charged in the window before: of whole tokens, whole ones.
  local function counted(previous, token, window_us, at_us)
    local left_us, tokens = window_us - at_us % window_us, floor(previous / token)
    local product = tokens * left_us
    -- Where the product is no whole number, a token more or less does not matter.
    if product <= 2^53 then
      product = product / window_us
    else
      product = tokens * (left_us / window_us)
    end
    return min(floor(product) * token, 2^53)
  end

  -- How fast the level of a sliding window rises until its end.
  local function slope(previous, token, window_us) return floor(floor(previous / token) * token / window_us) end

  local function window_ends_us(window_us, at_us) return (floor(at_us / window_us) + 1) * window_us end

  -- Charges to the window before what was spent in it of `units`. Returns what was charged in it then, and the units
  -- that the level is still to be charged for.
  local function charge_window_before(previous, token, burst, window_us, stamp_us, held_stamp_us, units, spent_before)
    if floor(stamp_us / window_us) - floor(held_stamp_us / window_us) ~= 1 then return previous, units end
    local before = min(spent_before * token, units, burst - previous)
    local counted_before = counted(previous, token, window_us, stamp_us)
    previous = previous + before
    return previous, units - before + counted(previous, token, window_us, stamp_us) - counted_before
  end

  -- What can be leased of a sliding window, and what was charged in the window before, by what is known here and what a node
  -- claims: the most that was charged in the window now, and in the one before. A record that begins empty has charged all in the
  -- window now.
  local function join_charges(unleased, previous, claim, claimed_previous, token, burst, window_us, stamp_us)
    local own = burst - unleased - counted(previous, token, window_us, stamp_us)
    local charged = max(own, burst - claim - counted(claimed_previous, token, window_us, stamp_us))
    if own < burst then previous = max(previous, claimed_previous) end
    return max(burst - charged - counted(previous, token, window_us, stamp_us), -2^52), previous
  end

  -- The level when it is known which window of a calendar it is, what is still outstanding then, and when that window ends: 0 if
  -- no node has told. `ends_us` is when the window of the level ends; a node has told when the one now began and ends.
  local function open_window(level, out0, out1, ends_us, burst, window_us, stamp_us, epoch_us, told_begins_us, told_ends_us)
    -- No window is longer than four that the quota names. If one is, the lane's time went back.
    local latest_us = now_us + 4 * window_us
    if ends_us > latest_us then ends_us = 0 end
    local is_now = told_begins_us <= now_us and now_us < told_ends_us and told_ends_us <= latest_us
    if not is_now or now_us < ends_us then return level, out0, out1, ends_us end
    if ends_us > 0 then
      -- Leases that had ended by then are of the window before.
      local epochs = floor(told_begins_us / epoch_us) - floor(stamp_us / epoch_us)
      if epochs >= 1 then level, out1 = max(level - max(out1, 0), -2^52), 0 end
      if epochs >= 2 then level, out0 = max(level - max(out0, 0), -2^52), 0 end
      -- Each window that has ended pays a burst.
      local windows = 1 + floor(max(told_begins_us - ends_us, 0) / window_us)
      level = min(level + burst * windows, burst)
    end
    return level, out0, out1, told_ends_us
  end

  -- The level at `until_us` of windows, and what was charged in the window before.
  local function pass_windows(curve, token, burst, window_us, from_us, until_us, level, previous)
    if curve == CALENDAR_WINDOW then return level, previous end
    local passed = floor(until_us / window_us) - floor(from_us / window_us)
    if curve == FIXED_WINDOW then
      if passed > 0 then level = min(level + burst * passed, burst) end
      return level, previous
    end
    local current = max(burst - level - counted(previous, token, window_us, from_us), 0)
    if passed > 0 then
      -- Of more than a burst, the rest is carried on.
      local owed = max(current - burst * (passed - 1), 0)
      current, previous = max(owed - burst, 0), min(owed, burst)
    end
    return max(burst - current - counted(previous, token, window_us, until_us), -2^52), previous
  end

  -- The level now of a key that had nothing at `since_us`, and what was charged in the window before.
  -- `slots` come to be those of a log.
  local function empty_since(since_us, curve, rate, token, burst, slots)
    local from_us, window_us = min(since_us, now_us), window_of(rate, burst)
    if curve == SLIDING_LOG then
      return logs().pass(slots, burst, window_us, 0, from_us, now_us), 0
    elseif curve >= FIXED_WINDOW then
      return pass_windows(curve, token, burst, window_us, from_us, now_us, 0, 0)
    end
    return min(rate * (now_us - since_us), burst), 0
  end

  -- Whether all that was spent before the loss is in a view of this time, or still known to the node that spent it.
  -- 1 stands for no view.
  local function is_recent(viewed_us) return viewed_us > 1 and from_us > 0 and viewed_us >= from_us - REMEMBERED_US end

  -- The record of a bucket that is not in the store. `is_known`: the node knows that it was. While a lane waits for all
  -- its nodes, the lowest of their claims tells the level.
  -- The last of them may be that of a view at `entry_viewed_us`.
  local function first_record(quota, rate, burst, is_known, entry_viewed_us)
    local level, until_us, previous, slots = burst, 0, 0, {}
    if lost_us > 0 and burst <= rate * EMPTY_AFTER_LOSS_US and not is_lost and not is_recent(entry_viewed_us) then
      local _, token, _, _, _, curve = unpack_numbers('<dddddd', quota, #MAGIC + 1)
      level, previous = empty_since(lost_us, curve, rate, token, burst, slots)
    end
    if is_known and not is_lost then until_us = now_us + recovery_us end
    local record = pack(BUCKET_FORMAT, quota, 0, now_us, 0, 0, 0, 0, now_us, level, level, 0, 0, 0, 0, 0)
    if until_us > 0 or is_returning or previous > 0 or slots[1] then
      record = record .. pack(TROUBLE_FORMAT, 0, until_us, 0, is_returning and level or 0, 0, 0)
    end
    if previous > 0 then record = record .. pack('<d', previous) end
    if slots[1] then record = record .. logs().written(slots) end
    return record
  end

  -- The record of a key that comes more than once in a batch: what the entries before `index` made of
  -- what was `found`.
  local function record_now(name, index, found, records, places)
    for earlier = 1, index - 1 do
      local record = records[earlier]
      if record and KEYS[3 + earlier] == name then
        local is_tail = places[earlier] == TAIL_AT
        local at = tonumber(TAIL_AT)
        found = is_tail and found:sub(1, at) .. record .. found:sub(at + #record + 1) or record
      end
    end
    return found
  end

  -- What can be leased at most of a key that nodes have registered by a view of `viewed_us` at most since the loss, or not at all
  -- (0): if it is quick and that view is old, it had nothing at the loss beside what is leased. Who spent since the view may know it
  -- no more. `leased` flows to nodes out of a token bucket's refill.
  local function most_in_doubt(viewed_us, curve, rate, token, burst, leased)
    if burst > rate * EMPTY_AFTER_LOSS_US or is_recent(viewed_us) then return 2^53 end
    local flowed = empty_since(lost_us, curve, rate, token, burst, {})
    return curve >= FIXED_WINDOW and flowed or flowed - min(leased * (now_us - lost_us), 2^52)
  end

  -- Ends a lease: what was outstanding counts as spent, and what was spent ahead is owed.
  local function end_lease(level, unleased, out)
    if out > 0 then
      return max(level - out, -2^52), unleased
    end
    return level, max(unleased + out, -2^52)
  end

  -- Brings a bucket from `stamp_us` to now, ending leases whose epochs are over on the way.
  local function pass_time(viewed_us, entry_viewed_us, curve, previous, slots, rate, token, burst, epoch_us, stamp_us, level, unleased,
      after_silence, leased0, leased1, depth0, depth1, out0, out1, demand0, demand1)
    local is_windows, window_us = curve >= FIXED_WINDOW, window_of(rate, burst)
    if stamp_us > now_us + floor(burst / rate) + 1 then
      -- The lane's time was lost with the lane.
      level, unleased = end_lease(level, unleased, out0)
      level, unleased = end_lease(level, unleased, out1)
      leased0, leased1, depth0, depth1, out0, out1, demand0, demand1 = 0, 0, 0, 0, 0, 0, 0, 0
      if curve == SLIDING_WINDOW then
        local current = max(burst - level - counted(previous, token, window_us, stamp_us), 0)
        level = max(burst - current - counted(previous, token, window_us, now_us), -2^52)
      elseif curve == SLIDING_LOG then
        slots = logs().no_later_than(slots, window_us, now_us)
      end
      stamp_us = now_us
    end
    local until_us = now_us
    if until_us < stamp_us then until_us = stamp_us end
    local epoch, at_us = floor(stamp_us / epoch_us), stamp_us
    -- What was spent of a lease was spent before it ended: not in a window that begins then.
    local early_us = is_windows and 1 or 0
    for alive = 2, 0, -1 do
      local ends_us = (epoch + 3 - alive) * epoch_us - early_us
      if alive == 0 or ends_us > until_us then ends_us = until_us end
      if ends_us > at_us then
        local passed_us = ends_us - at_us
        local refill_ends_us = curve == SLIDING_WINDOW and window_ends_us(window_us, at_us) or 2^53
        local refill_us = min(ends_us, refill_ends_us) - at_us
        local free, depth = rate, 0
        if alive >= 1 then
          out0 = min(out0 + leased0 * refill_us, 2^52)
          free, depth = free - leased0, depth0
        else
          level, unleased = end_lease(level, unleased, out0)
          out0 = 0
        end
        if alive == 2 then
          out1 = min(out1 + leased1 * refill_us, 2^52)
          free, depth = free - leased1, depth + depth1
        else
          level, unleased = end_lease(level, unleased, out1)
          out1 = 0
        end
        if ends_us >= refill_ends_us then leased0, leased1 = 0, 0 end
        if free > 0 then unleased = unleased + free * passed_us end
        unleased = min(unleased, max(burst - depth * token, 0))
        if curve == SLIDING_LOG then
          level = logs().pass(slots, burst, window_us, level, at_us, ends_us)
        elseif is_windows then
          level, previous = pass_windows(curve, token, burst, window_us, at_us, ends_us, level, previous)
        else
          level = min(level + rate * passed_us, burst)
        end
        at_us = ends_us
      end
    end
    local turned = floor(until_us / epoch_us) - epoch
    if turned > 1 then
      level, unleased = end_lease(level, unleased, out0)
      leased0, depth0, out0, demand0 = 0, 0, 0, 0
    end
    if turned > 0 then
      level, unleased = end_lease(level, unleased, out1)
      leased0, leased1, depth0, depth1 = 0, leased0, 0, depth0
      out0, out1, demand0, demand1 = 0, out0, 0, demand0
    end
    if is_windows then unleased = level - out0 - out1 end
    if (stamp_us < lost_us or viewed_us > 0) and not is_lost then
      -- All nodes have told what they know.
      local newest_us = max(stamp_us < lost_us and 0 or viewed_us, entry_viewed_us)
      local most = most_in_doubt(newest_us, curve, rate, token, burst, leased0 + leased1)
      if most < 2^53 then
        unleased = min(unleased, most)
        -- What is outstanding of a token bucket is the most that there can be, and may be less.
        level = max(min(level, is_windows and unleased + out0 + out1 or unleased), -2^52)
      end
    end
    if stamp_us < silent_until_us then after_silence = unleased end
    return previous, slots, until_us, level, unleased, after_silence,
      leased0, leased1, depth0, depth1, out0, out1, demand0, demand1
  end

  -- Whether a record of a bucket's length is one: no other program's numbers mean anything.
  local function is_ours(own, rate, token, burst, version, epoch_us, stamp_us, level)
    local least = min(rate, token, burst, epoch_us)
    local most = max(rate, token, burst, epoch_us, version, stamp_us, level, -level)
    local parts = rate % 1 + token % 1 + burst % 1 + epoch_us % 1 + version % 1
    return own:sub(1, #MAGIC) == MAGIC and parts == 0 and least >= 1 and version >= 0 and most <= 2^53
  end

  -- What windows have that another plan had allowed, once time has passed: what was spent in this one becomes what was
  -- spent in the one before.
  local function pass_beyond(curve, rate, burst, before_us, stamp_us, is_opened, beyond, beyond_before)
    if curve == CALENDAR_WINDOW then
      if is_opened then return 0, 0 end
    elseif curve == FIXED_WINDOW or curve == SLIDING_WINDOW then
      local window_us = window_of(rate, burst)
      local passed = floor(stamp_us / window_us) - floor(before_us / window_us)
      if passed == 1 and curve == SLIDING_WINDOW then return 0, beyond end
      if passed ~= 0 then return 0, 0 end
    end
    return beyond, beyond_before
  end

  -- Moves a bucket to a newer definition of its limit; leases of the old one count until they end.
  local function adopt(ratio, old, new, beyond, beyond_before, previous, slots, stamp_us, level, unleased, after_silence,
      leased0, leased1, depth0, depth1, out0, out1, demand0, demand1)
    local old_rate, old_token, old_burst, old_curve = old[1], old[2], old[3], old[4]
    local rate, token, burst, curve = new[1], new[2], new[3], new[4]
    local old_window_us, window_us = window_of(old_rate, old_burst), window_of(rate, burst)
    local ends_us = 0
    if old_curve == CALENDAR_WINDOW then
      if curve == old_curve then ends_us = previous end
      previous = 0
    end
    if old_curve < FIXED_WINDOW and curve >= FIXED_WINDOW then
      -- A token bucket's refill does not end with a window, so windows cannot take it over: it is void.
      level, unleased = end_lease(level, unleased, out0)
      level, unleased = end_lease(level, unleased, out1)
      leased0, leased1, depth0, depth1, out0, out1, demand0, demand1 = 0, 0, 0, 0, 0, 0, 0, 0
    end
    if old_curve == SLIDING_WINDOW then
      -- Refill of the old plan flows until its window's end.
      local refill_us = window_ends_us(old_window_us, stamp_us) - stamp_us
      out0, out1 = min(out0 + leased0 * refill_us, 2^52), min(out1 + leased1 * refill_us, 2^52)
      leased0, leased1 = 0, 0
    end
    local old_level = level
    local current = max(old_burst - level - counted(previous, old_token, old_window_us, stamp_us), 0)
    level = max(min(floor(level * ratio), burst), -2^52)
    unleased = max(min(floor(unleased * ratio), burst), -2^52)
    after_silence = max(min(floor(after_silence * ratio), burst), -2^52)
    leased0, leased1 = min(ceil(leased0 * ratio), 2^52), min(ceil(leased1 * ratio), 2^52)
    out0 = max(min(ceil(out0 * ratio), 2^52), -2^52)
    out1 = max(min(ceil(out1 * ratio), 2^52), -2^52)
    demand0, demand1 = min(ceil(demand0 * ratio), 2^52), min(ceil(demand1 * ratio), 2^52)
    local function up(units) return max(min(ceil(units * ratio), 2^52), -2^52) end
    local before, was_beyond, was_beyond_before = previous, beyond, beyond_before
    previous, beyond, beyond_before = ends_us, 0, 0
    if curve >= FIXED_WINDOW then
      if curve == SLIDING_LOG and old_curve == curve then
        -- What was spent stays, and leaves a window of the new plan later. Of another definition's, as much as counts.
        slots = logs().convert(slots, ratio, old_window_us, window_us, stamp_us)
        level = max(burst - up(old_burst - old_level), ratio == 1 and -2^52 or 0)
        logs().settle(slots, burst, window_us, level, stamp_us)
      elseif old_curve == curve then
        -- What was spent stays. Beyond the new burst it is not counted, so that the next window does not owe it.
        local owed = max(current - old_burst, 0)
        local spent, most, counts_before = ceil((current - owed) / old_token) + was_beyond, floor(burst / token), 0
        current, beyond = min(spent, most) * token, max(spent - most, 0)
        if curve == SLIDING_WINDOW then
          before = ceil(before / old_token) + was_beyond_before
          previous, beyond_before = min(before, most) * token, max(before - most, 0)
          counts_before = counted(previous, token, window_us, stamp_us)
        end
        level = max(burst - current - up(owed) - counts_before, -2^52)
      end
      unleased = level - out0 - out1
    end
    if curve ~= SLIDING_LOG or old_curve ~= curve then slots = {} end
    return beyond, beyond_before, previous, slots, stamp_us, level, unleased, after_silence,
      leased0, leased1, depth0, depth1, out0, out1, demand0, demand1
  end

  -- Takes back charges of `from_us` or later. Of a window that has ended nothing comes back.
  local function refund(level, charged, beyond, tokens, curve, token, burst, window_us, previous, stamp_us, from_us,
      told_begins_us, told_ends_us)
    local most, is_of_window_now = burst, true
    if curve == SLIDING_WINDOW then most = burst - counted(previous, token, window_us, stamp_us) end
    if curve == FIXED_WINDOW or curve == SLIDING_WINDOW then
      is_of_window_now = floor(stamp_us / window_us) == floor(from_us / window_us)
    elseif curve == SLIDING_LOG then
      -- A charge that has left is not taken back: those that are left are of others.
      is_of_window_now = stamp_us - from_us < window_us
    elseif curve == CALENDAR_WINDOW then
      is_of_window_now = previous == told_ends_us and from_us >= told_begins_us and told_ends_us > 0
    end
    if not is_of_window_now then return level, charged, beyond end
    -- What was spent beyond the burst, because another plan had allowed it, comes first: it is not in the level.
    local of_beyond = min(tokens, beyond)
    level = max(level, min(level + (tokens - of_beyond) * token, most))
    return level, max(charged - tokens, 0), beyond - of_beyond
  end

  -- Debt beyond this is written off. What all nodes may spend on credit never is: they would have it
  -- twice.
  local function lowest_level(rate, token, burst, slots)
    -- Nor is what a log has beyond its burst, because another plan had allowed it: that leaves by itself.
    local beyond = slots and max(min(logs().sum_of(slots) - burst, 2^52), 0) or 0
    return max(-max(burst, rate * DEBT_US, min(most_nodes * CREDIT_TOKENS * token, 2^52)) - beyond, -2^52)
  end

  -- What nodes that have not reported yet may have taken under their policies, in units.
  local function reserve(rate, burst, after_silence)
    local flowed = min(rate * (since_us - from_us), burst)
    local whole = min(max(after_silence, flowed) + rate * (now_us - since_us), 2^52)
    return ceil(whole * (missing / max(expected, 1)))
  end

  return { first_record = first_record, record_now = record_now, pass_time = pass_time, is_ours = is_ours,
    adopt = adopt, pass_beyond = pass_beyond, lowest_level = lowest_level, reserve = reserve, logs = logs, slope = slope,
    window_ends_us = window_ends_us, counted = counted, charge_window_before = charge_window_before, open_window = open_window,
    refund = refund, join_charges = join_charges, most_in_doubt = most_in_doubt }
end

---------------------------------------------------------------------------------------------------
-- All entries

-- Applies the entries that begin at `at` to the buckets that were `found`, and puts the grants into
-- `parts`, after what is there. Returns what is to be written: the records (false: nothing), where
-- each goes (an offset as a string, or as a number for how many milliseconds it is to be kept from
-- now on), and the longest of these times. Nil if a quota is none, if an entry names one that the batch does not
-- have, or if other than as many numbers follow entries as the batch says.
--
-- The order of steps is that of Key::apply in src/store/model/key.rs.
local function apply_all(batch, at, count, quota_count, more, found, parts, now_us, time_ms, nodes, lane_gives,
    recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
  local RECORD_MARGIN_MS, RECORD_MARGIN_LEAST_MS = 45000, 20000
  local CREDIT_TOKENS, DEBT_US, REPAY_US, REPAY_LEAST_PART = 15, 1000000, 100000, 16
  local WINDOW_TOKENS_A_NODE = 40
  -- A quota stands in a batch as it stands at the head of a bucket's record: rate, token, burst, version,
  -- length of an epoch, and curve.
  local QUOTA_FORMAT, QUOTA_BYTES, TOKEN_BUCKET = '<dddddd', 50, 1
  local FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG, CALENDAR_WINDOW =
    FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG, CALENDAR_WINDOW
  local ENTRY_FORMAT, REST_FORMAT, REST_NUMBERS, NUMBER_FORMAT =
    '<BBdddddddddddd', '<ddddddddddddddd', 15, '<d'
  -- A record: the quota; what changes with the epochs; what changes with each sync. Behind it stands what
  -- most records have nothing of: written off, recovering until (below 0: registered by a view of that time), nodes that
  -- were heard meanwhile, what could be leased after a silence.
  local BUCKET_FORMAT, BUCKET_BYTES = '<c50dddddddddddddd', QUOTA_BYTES + 14 * 8
  -- Behind that stands, if windows slide, what was charged in the window before; of a log, its slots; of a calendar,
  -- when the window ends.
  local TROUBLE_FORMAT, TROUBLE_BYTES, TROUBLE_BYTES_MAX = '<dddddd', 6 * 8, 6 * 8 + 70 * 16
  -- Redis uses the memory of a call's arguments of 64 bytes and less again: a tail is one. It begins at
  -- QUOTA_BYTES + 6 * 8.
  local TAIL_FORMAT, TAIL_AT, WHOLE_AT = '<dddddddd', '98', '0'
  local GRANT_FORMAT, TIMED_GRANT_FORMAT = '<Bddddddd', '<Bdddddddddd'
  -- Flags of an entry: 1 registers anew, 2 has a claim, 4 is followed by its rest, 8 resets the key, 16 is followed by
  -- what its claim says was charged in the window before, 32, behind that, by the time of its claim's view.
  local RESTORE, CLAIM, REST, RESET, CLAIM_PREVIOUS, VIEWED = 1, 2, 4, 8, 16, 32
  -- What a grant says. TIMED is added where its times are not those of the batch, LOST where the entry
  -- showed that the record had been lost, WITHHELD where the lane gives less than it has,
  -- CREDIT_WITHHELD where that is because something was lost or not heard of yet, PREVIOUS where it follows what was
  -- charged in the window before.
  local GIVEN, OTHER_QUOTA, FOREIGN, GIVEN_VOID, TIMED, LOST, WITHHELD, CREDIT_WITHHELD, PREVIOUS =
    0, 1, 2, 3, 4, 8, 16, 32, 64

  local pack, unpack_numbers, floor, min, max = pack, unpack_numbers, floor, min, max
  local rare
  -- The quotas of the batch, each with its bytes and with what follows from it: the demand that is
  -- pressing, and the levels below which refill is leased and above which it is wanted back.
  local quotas = {}
  for number = 1, quota_count do
    local bytes = batch:sub(at, at + QUOTA_BYTES - 1)
    local rate, token, burst, version, epoch_us, curve =
      unpack_numbers(QUOTA_FORMAT, bytes, #MAGIC + 1)
    local most = max(rate * DEBT_US, token, burst, version, 4 * epoch_us)
    local is_curve = curve >= TOKEN_BUCKET and curve <= CALENDAR_WINDOW and curve % 1 == 0
    local is_quota = bytes:sub(1, #MAGIC) == MAGIC and is_curve and version >= 0
      and min(rate, token, burst, epoch_us) >= 1 and most <= 2^52 and (rate + token + burst + version + epoch_us) % 1 == 0
    if not is_quota then
      return nil
    end
    quotas[number] = { bytes, rate, token, burst, version, epoch_us,
      rate + floor(rate / 4), floor(burst / 20), floor(burst / 10), floor(burst / token), curve,
      max(floor(burst / rate), WINDOW_LEAST_US) }
    at = at + QUOTA_BYTES
  end

  local even_share = 0.5 / max(nodes, 1)
  local kept_from_ms, parts_before = time_ms + RECORD_MARGIN_LEAST_MS, #parts
  local records, places, seen, longest_ms = {}, {}, {}, 0

  local terms, quota, rate, token, burst, version, wanted_epoch_us, busy_demand, low_level,
    high_level, capacity, curve, window_us, epoch_now, flowing_from_us
  -- Not those of a quota that is not there.
  terms = false

  for index = 1, count do
    local number, flags, spent, held_rate, held_depth, held_out, held_stamp_us, held_demand,
      held_tag, wanted_demand, want, want_rate, lost, claim, next_at =
      unpack_numbers(ENTRY_FORMAT, batch, at)
    local debt, allowed, taken, returned, back_rate, back_depth, needed, spent_before = 0, 0, 0, 0, 0, 0, 0, 0
    local refunded, refunded_from_us, window_begins_us, window_ends_us = 0, 0, 0, 0
    local unspent, unspent_given_us, taken_before, claimed_previous = 0, 0, 0, 0
    local restoring, has_claim, fresh, refusal, whole_changed = false, true, false, nil, false
    local has_refill_ended, is_reset, entry_viewed_us = false, false, 0
    at = next_at
    if flags ~= CLAIM then
      restoring, has_claim, is_reset = flags % 2 >= RESTORE, flags % 4 >= CLAIM, flags % 16 >= RESET
      if flags % RESET >= REST then more = more - REST_NUMBERS end
      local has_previous, has_view = flags % VIEWED >= CLAIM_PREVIOUS, flags >= VIEWED
      if has_previous then more = more - 1 end
      if has_view then more = more - 1 end
      if more < 0 then
        return nil
      end
      if flags % RESET >= REST then
        debt, allowed, taken, returned, back_rate, back_depth, needed, spent_before, refunded,
          refunded_from_us, window_begins_us, window_ends_us, unspent, unspent_given_us, taken_before, at =
            unpack_numbers(REST_FORMAT, batch, at)
      end
      if has_previous then claimed_previous, at = unpack_numbers(NUMBER_FORMAT, batch, at) end
      if has_view then entry_viewed_us, at = unpack_numbers(NUMBER_FORMAT, batch, at) end
    end
    if quotas[number] ~= terms then
      terms = quotas[number]
      if not terms then
        return nil
      end
      quota, rate, token, burst, version, wanted_epoch_us, busy_demand, low_level, high_level,
        capacity, curve, window_us = unpack(terms)
      epoch_now = floor(now_us / wanted_epoch_us)
      flowing_from_us = max(epoch_now * wanted_epoch_us, silent_until_us, lost_us)
      -- Only a token bucket's level rises evenly.
      if curve ~= TOKEN_BUCKET then flowing_from_us = 2^53 end
    end
    local rate_before = held_rate + back_rate

    -- The bucket.
    local name, record = KEYS[3 + index], found[1 + index]
    if seen[name] or not record then
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
    end
    if seen[name] then
      record = rare.record_now(name, index, record, records, places)
    end
    seen[name] = true
    if not record then
      -- MGET passes over other types in silence; nothing of ours is empty.
      fresh, whole_changed = true, true
      local is_known = rate_before > 0 or held_depth + back_depth > 0 or held_out ~= 0
        or has_claim and claim < burst
      record = call('TYPE', name).ok ~= 'none' and ''
        or rare.first_record(quota, rate, burst, is_known and not restoring, entry_viewed_us)
    end
    local length = #record
    local tail = length - BUCKET_BYTES
    if tail ~= 0 and (tail < TROUBLE_BYTES or tail > TROUBLE_BYTES_MAX or tail % 8 ~= 0) then
      -- The rest is computed for nothing, and thrown away.
      refusal = pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0)
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      record = rare.first_record(quota, rate, burst, false, 0)
      length = #record
    end
    local own, until_ms, birth_us, leased1, depth1, out1, demand1,
      stamp_us, level, unleased, charged, leased0, depth0, out0, demand0 =
      unpack_numbers(BUCKET_FORMAT, record)
    local written_off, recovering_until_us, heard, after_silence, previous, slots = 0, 0, 0, 0, 0, false
    local beyond, beyond_before, viewed_us = 0, 0, 0
    if length > BUCKET_BYTES then
      written_off, recovering_until_us, heard, after_silence, beyond, beyond_before =
        unpack_numbers(TROUBLE_FORMAT, record, BUCKET_BYTES + 1)
      if recovering_until_us < 0 then
        -- Nodes have registered the key since the lane lost its memory, the last by a view of this time.
        viewed_us, recovering_until_us = -recovering_until_us, 0
      end
    end
    local epoch, epoch_us = epoch_now, wanted_epoch_us

    -- The time that has passed: mostly within one epoch, under the same quota, with no outage.
    local passed_us = now_us - stamp_us
    if own == quota and passed_us > 0 and stamp_us >= flowing_from_us and viewed_us == 0 then
      out0 = out0 + leased0 * passed_us
      if out0 > 2^52 then out0 = 2^52 end
      if leased1 > 0 then
        out1, whole_changed = out1 + leased1 * passed_us, true
        if out1 > 2^52 then out1 = 2^52 end
      end
      local free = rate - leased0 - leased1
      if free > 0 then unleased = unleased + free * passed_us end
      local cap = burst - (depth0 + depth1) * token
      if cap < 0 then cap = 0 end
      if unleased > cap then unleased = cap end
      level = level + rate * passed_us
      if level > burst then level = burst end
      stamp_us = now_us
    else
      local own_rate, own_token, own_burst, own_version, own_curve = rate, token, burst, version, curve
      whole_changed = true
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      if own ~= quota then
        own_rate, own_token, own_burst, own_version, epoch_us, own_curve =
          unpack_numbers(QUOTA_FORMAT, own, #MAGIC + 1)
        if own_curve < TOKEN_BUCKET or own_curve > CALENDAR_WINDOW or own_curve % 1 ~= 0
          or not rare.is_ours(own, own_rate, own_token, own_burst, own_version, epoch_us, stamp_us, level) then
          refusal = pack(GRANT_FORMAT, FOREIGN, 0, 0, 0, 0, 0, 0, 0)
        elseif own_version > version or own_version == version
          and (own_rate ~= rate or own_token ~= token or own_burst ~= burst or own_curve ~= curve) then
          refusal = pack(GRANT_FORMAT, OTHER_QUOTA, own_version, own_rate, own_token, own_burst,
            own_curve - 1, 0, 0)
        end
      end
      if own_curve == SLIDING_LOG then
        slots = rare.logs().read(record, BUCKET_BYTES + TROUBLE_BYTES + 1)
      elseif (own_curve == SLIDING_WINDOW or own_curve == CALENDAR_WINDOW)
        and length > BUCKET_BYTES + TROUBLE_BYTES then
        previous = unpack_numbers('<d', record, BUCKET_BYTES + TROUBLE_BYTES + 1)
      end
      local before_us, ended_us = stamp_us, previous
      -- Of a calendar, `previous` is when the window ends.
      if own_curve == CALENDAR_WINDOW then
        level, out0, out1, previous = rare.open_window(level, out0, out1, previous, own_burst,
          max(floor(own_burst / own_rate), WINDOW_LEAST_US), stamp_us, epoch_us, window_begins_us, window_ends_us)
      end
      previous, slots, stamp_us, level, unleased, after_silence,
        leased0, leased1, depth0, depth1, out0, out1, demand0, demand1 =
        rare.pass_time(viewed_us, entry_viewed_us, own_curve, previous, slots, own_rate, own_token, own_burst, epoch_us, stamp_us,
          level, unleased, after_silence,
          leased0, leased1, depth0, depth1, out0, out1, demand0, demand1)
      if not is_lost or before_us < lost_us then viewed_us = 0 end
      if beyond + beyond_before > 0 then
        beyond, beyond_before = rare.pass_beyond(own_curve, own_rate, own_burst, before_us, stamp_us,
          ended_us ~= previous, beyond, beyond_before)
      end
      if own_version < version then
        beyond, beyond_before, previous, slots, stamp_us, level, unleased, after_silence,
          leased0, leased1, depth0, depth1, out0, out1, demand0, demand1 =
          rare.adopt(token / own_token, { own_rate, own_token, own_burst, own_curve }, { rate, token, burst, curve },
            beyond, beyond_before, previous, slots, stamp_us, level, unleased, after_silence,
            leased0, leased1, depth0, depth1, out0, out1, demand0, demand1)
        if curve == CALENDAR_WINDOW then
          ended_us = previous
          level, out0, out1, previous = rare.open_window(level, out0, out1, previous, burst, window_us, stamp_us, epoch_us,
            window_begins_us, window_ends_us)
          if previous ~= ended_us then beyond, beyond_before = 0, 0 end
          unleased = level - out0 - out1
        end
      end
      if leased0 + leased1 == 0 and depth0 + depth1 == 0 and out0 == 0 and out1 == 0
        and demand0 + demand1 == 0 then
        epoch_us = wanted_epoch_us
      end
      epoch = floor(stamp_us / epoch_us)
      own = quota
      if epoch_us ~= wanted_epoch_us then
        own = MAGIC .. pack(QUOTA_FORMAT, rate, token, burst, version, epoch_us, curve)
      end
    end

    -- A lease that is older than the record was granted by a record that is lost.
    local anew, status = fresh or restoring, GIVEN
    if fresh then
      if recovering_until_us > 0 then status = LOST end
    elseif held_stamp_us < birth_us
      and (rate_before > 0 or held_depth + back_depth > 0 or held_out ~= 0) then
      anew = true
      if not restoring and recovering_until_us == 0 then
        recovering_until_us, status, whole_changed = now_us + recovery_us, LOST, true
      end
    end
    if recovering_until_us > now_us and held_stamp_us > 0 and held_stamp_us < birth_us then
      -- Once all nodes have told what they hold, nobody else is to be waited for.
      heard, whole_changed = heard + 1, true
      if heard >= nodes then recovering_until_us = now_us end
    end

    -- What the node holds moves to the current epoch, less what it spent and returns. What was
    -- outstanding under a lease that has ended counts as spent already.
    local age, out = epoch - held_tag, held_out
    local is_current, refilled_us = age == 0 or age == 1, stamp_us - held_stamp_us
    if rate_before > 0 and curve ~= TOKEN_BUCKET then
      if curve == SLIDING_WINDOW then
        -- Refill ends with its window.
        local refill_ends_us = rare.window_ends_us(window_us, held_stamp_us)
        if stamp_us >= refill_ends_us then has_refill_ended, refilled_us = true, refill_ends_us - held_stamp_us end
      else
        -- Nothing but tokens is leased.
        is_current = false
      end
    end
    if refilled_us > 0 and not restoring then
      out = out + rate_before * refilled_us
      if out > 2^52 then out = 2^52 end
    end
    if has_refill_ended then rate_before, held_rate = 0, 0 end
    if anew then
      if restoring and is_current then
        -- Of what has flowed in since this life of the record began, the node had its part.
        local life_us = max(stamp_us - max(birth_us, lost_us), 0)
        unleased = max(unleased - min(rate_before * life_us, 2^52), -2^52)
      end
      -- Of what can be leased the lower holds; what the node holds was there beside it.
      local most = burst
      if has_claim then
        if curve == SLIDING_WINDOW then
          unleased, previous = rare.join_charges(unleased, previous, claim, min(claimed_previous, burst), token, burst,
            window_us, stamp_us)
        else
          unleased = min(unleased, claim)
        end
        level = min(level, unleased + out0 + out1)
      end
      -- Of a sliding window, what was charged in the one before still counts.
      if curve == SLIDING_WINDOW then most = burst - rare.counted(previous, token, window_us, stamp_us) end
      -- What a node holds that registers anew may not be there beside its claim: of a token bucket it tells the most that it
      -- can hold, and of a window the claim may be made from a view of an earlier one.
      if is_current and not restoring then level = level + out end
      level = max(min(level, most), -2^52)
    end
    if is_current then
      if anew then
        -- Nothing of it is registered.
      elseif age == 0 then
        leased0 = leased0 - rate_before
        if leased0 < 0 then leased0 = 0 end
        depth0 = depth0 - held_depth - back_depth
        if depth0 < 0 then depth0 = 0 end
        demand0 = demand0 - held_demand
        if demand0 < 0 then demand0 = 0 end
        out0 = out0 - out
        if out0 < -2^52 then out0 = -2^52 elseif out0 > 2^52 then out0 = 2^52 end
      else
        whole_changed = true
        leased1 = max(leased1 - rate_before, 0)
        depth1 = max(depth1 - held_depth - back_depth, 0)
        demand1 = max(demand1 - held_demand, 0)
        out1 = min(max(out1 - out, -2^52), 2^52)
      end
      local units = spent * token
      if units > 2^52 then units = 2^52 end
      local left = out - units - returned - lost
      if left < 0 then
        -- What the node has spent ahead is less than nothing, until its lease ends.
        left = max(left, -2^52)
        local kept = max(left, held_rate > 0 and -min(token * CREDIT_TOKENS, 2^52) or 0)
        out0 = out0 + kept
        left = left - kept
      else
        out0 = out0 + left
        left = 0
      end
      if out0 < -2^52 then out0 = -2^52 elseif out0 > 2^52 then out0 = 2^52 end
      leased0 = leased0 + held_rate
      if leased0 > 2^52 then leased0 = 2^52 end
      depth0 = depth0 + held_depth
      if depth0 > 2^52 then depth0 = 2^52 end
      if spent_before > 0 and curve == SLIDING_WINDOW and not restoring then
        -- What was spent in the window before is charged to it.
        previous, units = rare.charge_window_before(previous, token, burst, window_us, stamp_us,
          held_stamp_us, units, spent_before)
      end
      level = level - units
      if level < -2^52 then level = -2^52 end
      unleased = unleased + returned
      if unleased > 2^52 then unleased = 2^52 end
      unleased = unleased + left
    else
      if restoring then
        -- The lease has ended, and this record has not counted it as spent.
        local units = min(spent * token, 2^52)
        level, unleased = max(level - units, -2^52), max(unleased - units, -2^52)
      end
      if rate_before > 0 or held_depth + back_depth > 0 or held_out ~= 0 then
        status, held_rate, held_depth = status + GIVEN_VOID, 0, 0
      end
    end
    demand0 = demand0 + wanted_demand
    if demand0 > 2^52 then demand0 = 2^52 end

    -- What was spent on credit and under outage policies is charged.
    charged = charged + (spent + debt + allowed)
    if charged > 2^53 then charged = 2^53 end
    if debt > 0 then
      debt = min(debt * token, 2^52)
      level, unleased = max(level - debt, -2^52), unleased - debt
    end
    if unspent > 0 and not anew and unspent_given_us >= birth_us then
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      local ended_us = (floor(unspent_given_us / wanted_epoch_us) + 2) * wanted_epoch_us - 1
      if ended_us >= stamp_us then
        unspent = 0
      elseif curve == TOKEN_BUCKET then
        -- Refill of the time since may have filled the bucket without them.
        local flowed = min(rate * (stamp_us - ended_us), 2^52)
        unspent = floor(max(min(unspent * token, 2^52) - flowed, 0) / token)
      elseif curve == SLIDING_LOG then
        slots = slots or {}
        rare.logs().settle(slots, burst, window_us, level, stamp_us)
      end
      -- It is in the level alone: neither charged, nor beyond the burst.
      level = rare.refund(level, 0, 0, unspent, curve, token, burst, window_us, previous, stamp_us, ended_us,
        window_begins_us, window_ends_us)
    end
    if taken_before > 0 and curve == SLIDING_WINDOW then
      -- It lowers the level by as much as it still counts for.
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      local counted_before = rare.counted(previous, token, window_us, stamp_us)
      previous = previous + min(taken_before, max(burst - previous, 0))
      taken = taken + rare.counted(previous, token, window_us, stamp_us) - counted_before
    end
    if taken > 0 then
      level = max(min(level, 0), level - taken)
      unleased = max(min(unleased, 0), unleased - taken)
    end
    if refunded > 0 and not anew then
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      if curve == SLIDING_LOG then
        -- What was spent now is charged now; what goes back is of the oldest charges.
        slots = slots or {}
        rare.logs().settle(slots, burst, window_us, level, stamp_us)
      end
      level, charged, beyond = rare.refund(level, charged, beyond, refunded, curve, token, burst, window_us, previous,
        stamp_us, refunded_from_us, window_begins_us, window_ends_us)
    end
    if is_reset then
      -- As if it had never been used, but for what is leased.
      level, beyond, beyond_before = burst, 0, 0
      if curve == SLIDING_WINDOW then previous = 0 end
    end
    local depths = depth0 + depth1
    local found_level, cap = level - out0 - out1, burst - depths * token
    if unleased < found_level then unleased = found_level end
    if cap < 0 then cap = 0 end
    -- The depth of a window's leases keeps nothing from flowing in.
    if curve ~= TOKEN_BUCKET then cap = burst end
    if unleased > cap then unleased = cap end
    if restoring and curve ~= TOKEN_BUCKET then
      unleased = min(unleased, found_level)
    elseif restoring then
      -- What was charged in a life that is lost too is not in the level, but was in a depth. What is
      -- outstanding is the most that there can be, and may be less.
      level = max(min(level, unleased), -2^52)
    end
    if unleased < 0 then
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      local lowest = rare.lowest_level(rate, token, burst, slots)
      if unleased < lowest then
        -- Below -2^53 doubles skip integers, so the model and this count from there.
        written_off, whole_changed = min(written_off + (lowest - max(unleased, -2^53)), 2^53), true
        unleased = lowest
        if curve ~= TOKEN_BUCKET then level = lowest + out0 + out1 end
      end
    end

    if curve == SLIDING_LOG then
      slots = slots or {}
      rare.logs().settle(slots, burst, window_us, level, stamp_us)
    end

    -- Tokens out of the bucket: first what callers wait for, then half of the rest by share and
    -- half spread evenly, and one at least while there is one.
    local demand, share, tokens, slope, kept_back = demand0 + demand1, 0, 0, rate, 0
    if curve ~= TOKEN_BUCKET then
      slope = curve == SLIDING_WINDOW and rare.slope(previous, token, window_us) or 0
    end
    if demand > 0 then share = wanted_demand / demand end
    local most, target = slope, slope * share
    target = target - target % 1
    if target > want_rate then target = want_rate end
    -- The others still live on their shares.
    if is_returning then target = min(target, floor(slope / max(expected, 1))) end
    if curve ~= TOKEN_BUCKET then
      -- At a window's end refill leaves a part of a token on each node.
      local least = capacity < WINDOW_TOKENS_A_NODE * max(nodes, 1) and 80 or 20
      if floor(target * window_us / least) < token then target = 0 end
      -- The level rises by whole tokens, ahead of its refill by less than one.
      if curve == SLIDING_WINDOW and (leased0 + leased1 > 0 or target > 0) then kept_back = token end
    end
    local giving, reserved = lane_gives and now_us >= recovering_until_us, 0
    if is_returning then
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      reserved = rare.reserve(rate, burst, after_silence)
    end
    if giving and unleased > reserved + kept_back then
      local free = unleased - reserved - kept_back
      if needed > 0 then
        tokens = min(needed, floor(free / token))
        free = free - tokens * token
      end
      if want > 0 then
        local part = free * (share / 2 + even_share)
        part = (part - part % 1) / token
        part = part - part % 1
        if part < 1 and free >= token then part = 1 end
        if part > want then part = want end
        tokens = tokens + part
      end
      unleased = unleased - tokens * token
    end
    if unleased < 0 then
      -- Refill that is kept from leases so that debt is repaid: soon, but no more than the debt needs.
      local soon = min(max(floor(-unleased / REPAY_US), floor(slope / REPAY_LEAST_PART)), floor(slope / 2))
      most = slope - max(soon, min(floor(-unleased / DEBT_US), slope))
    end

    -- Refill, while tokens are few or the node gets less than half of what it wants; and what of it the
    -- store would like back.
    local leased, depth, added, recall = leased0 + leased1, tokens, 0, held_rate
    local pressing = is_returning or demand > busy_demand or needed + want > 2 * tokens
    if slope > 0 and (pressing or unleased <= high_level) then
      if giving and (pressing or unleased < low_level) then
        added = target - held_rate
        if added > most - leased then added = most - leased end
        if added < 0 then added = 0 end
        if held_rate + added > 0 then
          -- The depth that goes with it, on top of the tokens.
          -- Depth may take the place of the reserve, which is cut below, and a debt makes no room for any.
          local room, leasable = capacity * share / 2, unleased - reserved
          if leasable < 0 then leasable = 0 end
          local free = (burst - leasable) / token
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
      if unleased < 0 and leased > most then
        repay = ceil(held_rate * ((leased - most) / leased))
      end
      if above < repay then above = repay end
      if recall > above then recall = above end
    end
    leased0 = leased0 + added
    depth0 = depth0 + depth
    if depth0 > 2^52 then depth0 = 2^52 end
    out0 = out0 + tokens * token
    if out0 > 2^52 then out0 = 2^52 end
    -- Depth given in place of the reserve displaces it.
    if reserved > 0 and curve == TOKEN_BUCKET then
      unleased = min(unleased, max(burst - (depth0 + depth1) * token, 0))
    end
    -- What is kept back is not to be asked for.
    local whole, available = unleased + out0 + out1, unleased
    if kept_back > 0 then available = max(unleased - kept_back, min(unleased, 0)) end
    if whole > 2^53 then whole = 2^53 elseif whole < -2^53 then whole = -2^53 end
    if not giving or reserved > 0 then
      status = status + WITHHELD
      local doubtful = lost_us > 0 or is_returning or now_us < recovering_until_us
      if doubtful then status = status + CREDIT_WITHHELD end
    end

    if is_lost and lost_us > 0 then
      viewed_us, whole_changed = max(viewed_us, entry_viewed_us, 1), true
      recovering_until_us = -viewed_us
      rare = rare or seldom(now_us, recovery_us, is_returning, silent_until_us, lost_us, is_lost, expected, ...)
      available = min(available, rare.most_in_doubt(viewed_us, curve, rate, token, burst, leased0 + leased1))
      whole = min(whole, available + out0 + out1)
    end

    if refusal then
      parts[parts_before + index], records[index], places[index] = refusal, false, false
    else
      local slides = curve == SLIDING_WINDOW and previous > 0
      if slides then status = status + PREVIOUS end
      if stamp_us == now_us and epoch_us == wanted_epoch_us then
        parts[parts_before + index] = pack(GRANT_FORMAT, status, tokens, added, depth, available,
          whole, leased + added, recall)
      else
        parts[parts_before + index] = pack(TIMED_GRANT_FORMAT, status + TIMED, tokens, added, depth,
          available, whole, leased + added, recall,
          stamp_us, epoch, (epoch + 2) * epoch_us - now_us)
      end
      if slides then parts[parts_before + index] = parts[parts_before + index] .. pack(NUMBER_FORMAT, previous) end
      -- A bucket may be forgotten when it is full and all its leases have ended, and a little
      -- later. Its expiry is moved only when it has come near.
      local spare_us = (until_ms - kept_from_ms) * 1000 - 2 * epoch_us
      local place = TAIL_AT
      local missing, fill_us = burst - unleased, nil
      local is_due = spare_us < 0 or missing > spare_us * rate
      if curve ~= TOKEN_BUCKET then
        -- Until the window is over that counts last.
        local windows, each_us = ceil(missing / burst), window_us
        if curve == CALENDAR_WINDOW then
          each_us = 4 * window_us
        elseif curve ~= FIXED_WINDOW then
          windows = windows + 1
        end
        if curve == SLIDING_LOG then each_us = each_us + ceil(window_us / 64) end
        fill_us = missing > 0 and min(windows * each_us, 2^50) or 0
        if missing > 0 and curve == CALENDAR_WINDOW and previous > 0 then
          -- The first window ends when the node says.
          fill_us = max(fill_us - each_us, 0) + max(previous - stamp_us, 0)
        end
        is_due = spare_us < fill_us
      end
      if is_due then
        fill_us = fill_us or ceil(missing / rate)
        local keep_ms = floor((fill_us + 2 * epoch_us) / 1000) + RECORD_MARGIN_MS
        longest_ms = max(longest_ms, keep_ms)
        until_ms, whole_changed, place = time_ms + keep_ms, true, keep_ms
      elseif whole_changed then
        place = WHOLE_AT
      end
      if whole_changed then
        record = pack(BUCKET_FORMAT, own, until_ms, birth_us, leased1, depth1, out1, demand1,
          stamp_us, level, unleased, charged, leased0, depth0, out0, demand0)
        if length > BUCKET_BYTES or previous ~= 0 or slots and slots[1]
          or written_off > 0 or recovering_until_us ~= 0 or after_silence ~= 0 or beyond + beyond_before > 0 then
          record = record .. pack(TROUBLE_FORMAT, written_off, recovering_until_us, heard, after_silence,
            beyond, beyond_before)
          if curve == SLIDING_WINDOW or curve == CALENDAR_WINDOW then
            record = record .. pack('<d', previous)
          elseif curve == SLIDING_LOG then
            record = record .. rare.logs().written(slots)
          end
          -- It does not become shorter: what is written at an offset leaves the rest of what was there.
          if #record < length then record = record .. ('\0'):rep(length - #record) end
        end
      else
        record = pack(TAIL_FORMAT,
          stamp_us, level, unleased, charged, leased0, depth0, out0, demand0)
      end
      records[index], places[index] = record, place
    end
  end
  if more > 0 then
    return nil
  end
  return records, places, longest_ms
end
