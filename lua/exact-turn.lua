-- exact-turn: decides about one request by a token bucket or a leaky bucket, as src/algorithm/turn.rs defines them.
--
-- KEYS[1]    the key's record (string)
-- ARGV[1]    11 numbers, made by src/store/exact/turn.rs
--            rate, token, burst    units that flow in a microsecond, units of a token, tokens of the burst (0: a leaky
--                                  bucket)
--            cost_us, cost_part    what the request costs; zeros: nothing is spent; negative: so much was spent, and goes back;
--                                  -2^53: everything goes back, so that the key is as if it had never been used
--            most_us, most_part    how far ahead the key may be for the request to be allowed
--            clock_us              the clock went back if it is so far behind the last decision
--            was_us, was_part      for what goes back: until when the key was not free once it was spent. A slot goes back only
--                                  if that is still so: later ones stay where they were promised
--            keep_us               added to the time after which the record is forgotten
--
-- Reply      a bulk string of 4 numbers: 1 if the request is allowed or was given back, else 0; when that was decided, in
--            microseconds since 1970; ahead_us, ahead_part: how far ahead the key is now
-- Record     'T1' and 6 numbers: free_us, free_part: when the key is as if it had never been used; when it was
--            allowed something last; rate, token and burst at that time
-- Errors     TIDEGATE FOREIGN (key) <type>  the key holds another program's value of this type; WRONGTYPE: of another
-- Expiry     when the key is as if it had never been used, and never earlier than before: by another rule more may be missing
-- Writes     if tokens are spent or go back; a denied request, if the rule has changed, or if the clock went back by more than
--            clock_us; one that costs nothing never
-- Cost       O(1). Calls: TIME, GET, and if it writes a SET, with a PTTL before if there is a record.
--
-- A span of time is a pair: whole microseconds, and the rest in units, of which a microsecond has `rate`. So all numbers
-- stay below 2^53, where doubles are exact.

local MAGIC, FORMAT, BYTES, RESET, AHEAD_MAX_US = 'T1', '<c2dddddd', 2 + 6 * 8, -2^53, 2^49
local call, ceil, min, max = redis.call, math.ceil, math.min, math.max

local rate, token, burst, cost_us, cost_part, most_us, most_part, clock_us, was_us, was_part, keep_us =
  struct.unpack('<ddddddddddd', ARGV[1])
local is_return, is_reset = cost_us < 0 or cost_part < 0, cost_us == RESET
local is_look = cost_us == 0 and cost_part == 0
local record = call('GET', KEYS[1])
local clock = call('TIME')
local server_us = clock[1] * 1000000 + clock[2]

-- A bucket without a record is full.
local now, free_us, free_part, is_written, goes_back = server_us, 0, 0, false, burst > 0 or is_reset
if record then
  if #record ~= BYTES or record:sub(1, 2) ~= MAGIC then
    return redis.error_reply('TIDEGATE FOREIGN (key) string')
  end
  local _, stamp, old_rate, old_token, old_burst
  _, free_us, free_part, stamp, old_rate, old_token, old_burst = struct.unpack(FORMAT, record)
  local is_converted = old_rate ~= rate or old_token ~= token or old_burst ~= burst
  if is_return and is_converted and not is_reset then
    return struct.pack('<dddd', 0, now, 0, 0)
  end
  goes_back = burst > 0 or is_reset or free_us == was_us and free_part == was_part
  if stamp - now > clock_us then
    free_us, is_written = free_us - (stamp - now), true
  else
    now = max(now, stamp)
  end
  if is_converted then
    if free_us < now then free_us, free_part = now, 0 end
    if burst == 0 then
      -- The slots before this one were promised.
      if free_part > 0 then free_us, free_part = free_us + 1, 0 end
    else
      local missing = ((free_us - now) * old_rate + free_part) / old_token
      local left = min(max(old_burst - missing, -burst), burst)
      free_us, free_part = now + ceil((burst - left) * token / rate), 0
    end
    -- What flows in from now on does so by the new rule, also if this request is denied.
    is_written = true
  end
end
if free_us < now then free_us, free_part = now, 0 end

local ahead_us = free_us - now
local is_allowed = ahead_us < most_us or ahead_us == most_us and free_part <= most_part
if is_return then is_allowed = goes_back end
if is_allowed and not is_look and (record or not is_return) then
  free_us, free_part, is_written = free_us + cost_us, free_part + cost_part, true
  if free_part >= rate then free_us, free_part = free_us + 1, free_part - rate end
  if free_part < 0 then free_us, free_part = free_us - 1, free_part + rate end
  if free_us < now then free_us, free_part = now, 0 end
  if free_us - now > AHEAD_MAX_US then free_us, free_part = now + AHEAD_MAX_US, 0 end
end
if is_written and not is_look then
  local keep_ms = ceil((max(free_us + 1, now) - server_us + keep_us) / 1000)
  if record and not is_reset then keep_ms = max(keep_ms, call('PTTL', KEYS[1])) end
  call('SET', KEYS[1], struct.pack(FORMAT, MAGIC, free_us, free_part, now, rate, token, burst), 'PX', keep_ms)
end
return struct.pack('<dddd', is_allowed and 1 or 0, now, free_us - now, free_part)
