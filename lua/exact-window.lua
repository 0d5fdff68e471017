-- exact-window: decides about one request by a fixed or a sliding window, as src/algorithm/window.rs defines them.
--
-- KEYS[1]    the key's record (string)
-- ARGV[1]    7 numbers, or 16 where windows are a calendar's; made by src/store/exact/window.rs
--            tokens, period_us     of the limit
--            sliding               1 if the window before counts for the part of it that is less than a period ago
--            ask, cost             what the request must find, and what it spends: 0 for nothing; below 0: so much was spent,
--                                  and goes back; -2^53: everything goes back, so that the key is as if it had never been used
--            at_us                 for what goes back: when it was spent
--            keep_us               added to the time after which the record is forgotten
--            number, begins_us, ends_us    of three windows of the calendar, in microseconds since 1970. Times are then
--                                  those of the calendar: each window has the same period, and ends when its period does
--
-- Reply      a bulk string of 4 numbers: 1 if the request is allowed or was given back, else 0; when that was decided, in
--            microseconds since 1970 or of the calendar; what was spent in the window of that time by then, and in the one before
-- Record     'W1' and 4 numbers: when the key was allowed something last; what was spent in that window, and in the one
--            before; the period
-- Errors     TIDEGATE FOREIGN (key) <type>  the key holds another program's value of this type; WRONGTYPE: of another
--            TIDEGATE CALENDAR <text>       the time is in none of the windows
-- Expiry     when nothing counts any more: at the window's end, or the next one's if windows slide
-- Writes     if tokens are spent or go back; a denied request, if the period has changed, or if the clock went back by more than
--            a period; one that costs nothing never
-- Cost       O(1). Calls: TIME, GET, and a SET if it writes.
--
-- Windows begin at multiples of the period since 1970, or of the calendar. A time is below 2^53, so quotients of times are rounded down rightly.

local MAGIC, FORMAT, BYTES, RESET, SPENT_MAX = 'W1', '<c2dddd', 2 + 4 * 8, -2^53, 2^32 - 1
local call, ceil, floor, min, max = redis.call, math.ceil, math.floor, math.min, math.max

local tokens, period_us, sliding, ask, cost, at_us, keep_us = struct.unpack('<ddddddd', ARGV[1])
local record = call('GET', KEYS[1])
local clock = call('TIME')
local server_us = clock[1] * 1000000 + clock[2]

if #ARGV[1] > 7 * 8 then
  local unix_us = server_us
  server_us = nil
  for at = 7 * 8 + 1, #ARGV[1], 3 * 8 do
    local number, begins_us, ends_us = struct.unpack('<ddd', ARGV[1], at)
    if begins_us <= unix_us and unix_us < ends_us then
      server_us = (number + 1) * period_us - min(ends_us - unix_us, period_us)
      break
    end
  end
  if not server_us then
    return redis.error_reply('TIDEGATE CALENDAR clocks of node and server are a window apart: it is '
      .. clock[1] .. ' s here')
  end
end

local now, current, previous, is_written = server_us, 0, 0, false
if record then
  if #record ~= BYTES or record:sub(1, 2) ~= MAGIC then
    return redis.error_reply('TIDEGATE FOREIGN (key) string')
  end
  local _, stamp, old_period_us
  _, stamp, current, previous, old_period_us = struct.unpack(FORMAT, record)
  if old_period_us ~= period_us and cost < 0 and cost ~= RESET then
    -- Another plan counts by now.
    return struct.pack('<dddd', 0, now, 0, 0)
  end
  if old_period_us ~= period_us then
    -- As if the new period had been there when something was spent last; of a calendar, that is not known.
    current, previous, is_written = min(current, tokens), min(previous, tokens), true
    if #ARGV[1] > 7 * 8 then stamp = now end
  end
  if stamp - now > period_us then
    -- The clock went back: what was spent counts as if it had been spent now.
    is_written = true
  else
    now = max(now, stamp)
    local passed = floor(now / period_us) - floor(stamp / period_us)
    if passed == 1 then
      current, previous = 0, current
    elseif passed > 1 then
      current, previous = 0, 0
    end
  end
end

-- What counts of the window before, rounded down.
local left_us, counted = period_us - now % period_us, 0
if sliding == 1 and previous > 0 then
  if previous * left_us <= 2^53 then
    counted = floor(previous * left_us / period_us)
  else
    -- A long division: seven bits of `previous` at a time, so that nothing exceeds 2^53.
    local rest = 0
    for shift = 28, 0, -7 do
      local part = rest * 128 + floor(previous / 2^shift) % 128 * left_us
      counted, rest = counted * 128 + floor(part / period_us), part % period_us
    end
  end
end

local is_allowed = current + counted + ask <= tokens
if cost == RESET then
  current, previous, is_allowed, is_written = 0, 0, true, record and true
elseif cost < 0 then
  -- Into the window that it was taken from, while that counts.
  local passed = floor(now / period_us) - floor(at_us / period_us)
  is_allowed = record and (passed == 0 or passed == 1 and sliding == 1)
  if is_allowed and passed == 0 then
    current, is_written = max(current + cost, 0), true
  elseif is_allowed then
    previous, is_written = max(previous + cost, 0), true
  end
elseif is_allowed and cost > 0 then
  current, is_written = min(current + cost, SPENT_MAX), true
end
if is_written and cost ~= 0 then
  call('SET', KEYS[1], struct.pack(FORMAT, MAGIC, now, current, previous, period_us), 'PX',
    ceil((now + left_us + sliding * period_us - server_us + keep_us) / 1000))
end
return struct.pack('<dddd', is_allowed and 1 or 0, now, current, previous)
