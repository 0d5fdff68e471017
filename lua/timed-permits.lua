-- Releases timed permits of one key of a concurrency limit: permits that no node renews. lua/permits.lua takes them over from
-- nodes, and counts them.
--
-- KEYS[1]    a sorted set. A member is the id of a lot and, as text, a place from 0 up: one for each permit; its score is when its
--            time ends, in microseconds since 1970 by the server's clock
-- ARGV[1]    the id: 16 bytes
--
-- Reply      a bulk string, a little-endian double: how many permits of the lot there were, and are free now
-- Errors     WRONGTYPE: the key holds another program's value
-- Cost       O(n log m) for n permits of m. Calls: TIME, ZREMRANGEBYSCORE, ZREM for each permit and once more.

local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ('%.0f'):format(now))
local permits = 0
while call('ZREM', KEYS[1], ARGV[1] .. permits) == 1 do permits = permits + 1 end
return struct.pack('<d', permits)
