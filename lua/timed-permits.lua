-- Gives permits back that no node renews, of one key of a concurrency limit. lua/permits.lua keeps and counts them.
--
-- KEYS[1]    a sorted set. A member is the permits' number and, as text, a place from 0 up: one for each permit; its score is
--            when its time ends, in microseconds since 1970 by the server's clock
-- ARGV[1]    the number: 16 bytes
--
-- Reply      a bulk string, a little-endian double: how many permits there were, and are free now
-- Errors     WRONGTYPE: the key holds another program's value
-- Cost       O(n log m) for n permits of m. Calls: TIME, ZREMRANGEBYSCORE, ZREM for each permit and once more.

local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ('%.0f'):format(now))
local permits = 0
while call('ZREM', KEYS[1], ARGV[1] .. permits) == 1 do permits = permits + 1 end
return struct.pack('<d', permits)
