-- exact-log: decides about one request by a sliding log, as src/algorithm/sliding_log.rs defines it.
--
-- KEYS[1]    what the key spent (list)
-- ARGV[1]    6 numbers, made by src/store/exact/log.rs
--            tokens, period_us     of the limit
--            ask, cost             what the request must find, and what it spends: 0 for nothing; below 0: so much was spent,
--                                  and goes back; -2^53: everything goes back, so that the key is as if it had never been used
--            at_us                 for what goes back: when it was spent
--            keep_us               added to the time after which the list is forgotten
--
-- Reply      a bulk string of 6 numbers: 1 if the request is allowed or was given back, else 0; when that was decided, in
--            microseconds since 1970; tokens left; microseconds until the request would be allowed (0 if it is; a period if it
--            never would be), until the oldest tokens return, and until the last do (0 if none are spent)
-- List       An element has 2 numbers: when something was spent, and all that was spent by then. The first one is from
--            before the period, so what was spent within it is the difference between two elements; it is empty if nothing
--            was.
-- Errors     TIDEGATE FOREIGN (key) <type>  the key holds another program's value of this type; WRONGTYPE: of another
-- Expiry     when all tokens have returned
-- Writes     only if tokens are spent or go back, or if the clock went back by more than a period
-- Cost       O(log elements) looks, and what LTRIM takes of elements that have gone. Calls: LRANGE, LLEN, TIME, a LINDEX or
--            more if several elements have gone or the request is denied; if tokens are spent PEXPIRE, RPUSH (LSET within
--            one microsecond), and LTRIM if elements have gone. What goes back costs an LRANGE, an LSET for each element since
--            then, of which there may be 500, and an LTRIM.

local FORMAT, BYTES, LATER_MAX, RESET = '<dd', 2 * 8, 500, -2^53
local call, ceil, floor, min, max = redis.call, math.ceil, math.floor, math.min, math.max
local pack, unpack_numbers = struct.pack, struct.unpack

local tokens, period_us, ask, cost, at_us, keep_us = unpack_numbers('<dddddd', ARGV[1])
-- Mostly no more elements are looked at than these.
local head = call('LRANGE', KEYS[1], 0, 2)
local count = #head < 3 and #head or call('LLEN', KEYS[1])
local clock = call('TIME')
local server_us = clock[1] * 1000000 + clock[2]
local is_foreign = false

-- When, and what was spent by then, of an element: from 0 on, or from the last one, -1, back.
local function read(index)
  local element = head[index + 1] or call('LINDEX', KEYS[1], index)
  if element == '' then return 0, 0 end
  if #element ~= BYTES then
    is_foreign = true
    return 0, 0
  end
  return unpack_numbers(FORMAT, element)
end

-- The first element from `from` on of which `is_it` is true, or else `count`: steps that double, and then halves.
local function first(from, is_it)
  local low, high, step = from, from, 1
  while high < count and not is_it(read(high)) do
    low, high, step = high + 1, high + step, 2 * step
  end
  high = min(high, count)
  while low < high do
    local middle = floor((low + high) / 2)
    if is_it(read(middle)) then high = middle else low = middle + 1 end
  end
  return low
end

-- When something was spent last, and all that was by then.
local now, last_us, total = server_us, nil, 0
-- What was spent before the period, how many elements are from before it, and when the oldest tokens in it were spent.
local base, gone, oldest_us = 0, 0, nil
if count > 0 then
  last_us, total = read(-1)
  local ahead_us = last_us - now
  local newest_us = ahead_us > period_us and last_us or max(now, last_us)
  -- The first element stands for all before it, also if the limit's period has become longer since.
  gone = first(1, function(time_us) return time_us > newest_us - period_us end)
  local _
  _, base = read(gone - 1)
  if gone < count then oldest_us = read(gone) end
  if is_foreign then
    return redis.error_reply('TIDEGATE FOREIGN (key) list')
  end
  if ahead_us > period_us then
    -- The clock went back: what was spent counts as if it had been spent now.
    call('PEXPIRE', KEYS[1], ceil((period_us + keep_us) / 1000))
    call('LTRIM', KEYS[1], -2, -1)
    call('LSET', KEYS[1], 0, pack(FORMAT, 0, base))
    call('LSET', KEYS[1], -1, pack(FORMAT, now, total))
    head, count, gone, last_us, oldest_us = {}, 2, 1, now, now
  else
    now = newest_us
  end
end

-- Takes `-cost` off what was spent at `at_us`, and off all sums since. False if that does not count any more.
local function give_back()
  local place = first(gone, function(time_us) return time_us >= at_us end)
  if place >= count or count - place > LATER_MAX then return false end
  local spent_us, sum = read(place)
  local _, before = read(place - 1)
  local left = sum - before + cost
  if spent_us ~= at_us or left < 0 then return false end
  local shift = left == 0 and 1 or 0
  for index, element in ipairs(call('LRANGE', KEYS[1], place + shift, -1)) do
    local time_us, sum_by_then = unpack_numbers(FORMAT, element)
    call('LSET', KEYS[1], place + index - 1, pack(FORMAT, time_us, sum_by_then + cost))
  end
  if left == 0 and count == 2 then
    -- Nothing is left.
    call('LTRIM', KEYS[1], 1, 0)
  elseif left == 0 then
    call('LTRIM', KEYS[1], 0, -2)
  end
  count, head = count - shift, {}
  oldest_us = gone < count and read(gone) or nil
  if oldest_us then last_us = read(-1) end
  return true
end

local spent, retry_us = total - base, 0
local is_allowed = spent + ask <= tokens
if cost == RESET then
  is_allowed, spent, oldest_us = true, 0, nil
  if count > 0 then call('LTRIM', KEYS[1], 1, 0) end
elseif cost < 0 then
  is_allowed = count > 0 and give_back()
  if is_allowed then spent = spent + cost end
elseif not is_allowed then
  local enough = total + ask - tokens
  local place = first(gone, function(_, spent_by_then) return spent_by_then >= enough end)
  -- A cost above the limit never fits: a period.
  retry_us = place < count and read(place) + period_us - now or period_us
elseif cost > 0 then
  total, spent, oldest_us = total + cost, spent + cost, oldest_us or now
  local keep_ms = ceil((now + period_us - server_us + keep_us) / 1000)
  -- First: Redis does not roll back, and a user without the right to it then writes nothing that stays for ever.
  call('PEXPIRE', KEYS[1], keep_ms)
  if gone > 1 then call('LTRIM', KEYS[1], gone - 1, -1) end
  if last_us == now then
    call('LSET', KEYS[1], -1, pack(FORMAT, now, total))
  elseif last_us then
    call('RPUSH', KEYS[1], pack(FORMAT, now, total))
  else
    call('RPUSH', KEYS[1], '', pack(FORMAT, now, total))
    call('PEXPIRE', KEYS[1], keep_ms)
  end
  last_us = now
end
local next_us = oldest_us and oldest_us + period_us - now or 0
local reset_us = oldest_us and last_us + period_us - now or 0
return pack('<dddddd', is_allowed and 1 or 0, now, max(tokens - spent, 0), retry_us, next_us, reset_us)
