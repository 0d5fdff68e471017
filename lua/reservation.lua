-- A reservation that any process settles, once: what is needed for that is kept under its number until one takes it.
--
-- KEYS[1]    the record
-- ARGV[1]    for how long it is kept, in milliseconds; 0 takes it
-- ARGV[2]    what is kept; or 16 bytes that the taker alone knows, who may take it again when a reply was lost
-- ARGV[3]    for how long the taker may take it again, in milliseconds
--
-- Reply      a bulk string: when it is taken, the microseconds since it was kept as a little-endian double, and what was kept.
--            Empty if there is no such record, if another has taken it, and when it is kept
-- Record     'R1', when it was kept, in microseconds since 1970 by the server's clock, as such a double; 16 bytes, zeros until it
--            is taken, and then the taker's; what is kept
-- Errors     TIDEGATE FOREIGN (key) string  the key holds another program's value; WRONGTYPE: of another type
-- Cost       O(1). Calls: TIME; SET, or GET and SET.

local MAGIC, HEAD, NOBODY, AGES = 'R1', 26, ('\0'):rep(16), 2^52
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

if tonumber(ARGV[1]) > 0 then
  call('SET', KEYS[1], MAGIC .. struct.pack('<d', now) .. NOBODY .. ARGV[2], 'PX', ARGV[1])
  return ''
end
local record = call('GET', KEYS[1])
if not record then return '' end
if record:sub(1, 2) ~= MAGIC or #record < HEAD then return redis.error_reply('TIDEGATE FOREIGN (key) string') end
local kept, taker = struct.unpack('<d', record, 3), record:sub(11, HEAD)
if taker == NOBODY then
  call('SET', KEYS[1], record:sub(1, 10) .. ARGV[2] .. record:sub(HEAD + 1), 'PX', ARGV[3])
elseif taker ~= ARGV[2] then
  return ''
end
-- A clock that went back does not tell how old it is: then it is old.
local age = now < kept and AGES or now - kept
return struct.pack('<d', age) .. record:sub(HEAD + 1)
