-- A reservation that any process settles, once: what is needed for that is kept under its number until it is taken.
--
-- KEYS[1]    the record
-- ARGV[1]    for how long it is kept, in milliseconds; 0 takes it
-- ARGV[2]    what is kept
--
-- Reply      a bulk string: when it is taken, the microseconds since it was kept as a little-endian double, and what was kept.
--            Empty if there is no such record, and when it is kept
-- Record     'R1', when it was kept, in microseconds since 1970 by the server's clock, as such a double; what is kept
-- Errors     TIDEGATE FOREIGN (key) string  the key holds another program's value; WRONGTYPE: of another type
-- Cost       O(1). Calls: TIME; SET, or GET and DEL.

local MAGIC, call = 'R1', redis.call
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

if tonumber(ARGV[1]) > 0 then
  call('SET', KEYS[1], MAGIC .. struct.pack('<d', now) .. ARGV[2], 'PX', ARGV[1])
  return ''
end
local record = call('GET', KEYS[1])
if not record then return '' end
if record:sub(1, 2) ~= MAGIC or #record < 10 then return redis.error_reply('TIDEGATE FOREIGN (key) string') end
call('DEL', KEYS[1])
-- A clock that went back makes no reservation younger than it is.
return struct.pack('<d', math.max(now - struct.unpack('<d', record, 3), 0)) .. record:sub(11)
