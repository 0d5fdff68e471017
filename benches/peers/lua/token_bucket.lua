-- The usual token bucket in Redis: one call a request, nothing kept on the node.
--
-- KEYS[1] the bucket. ARGV[1] tokens a second, ARGV[2] burst. Returns 1 if the request may pass.

local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]

local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at_us')
local tokens, at_us = tonumber(bucket[1]) or burst, tonumber(bucket[2]) or now_us
tokens = math.min(burst, tokens + math.max(0, now_us - at_us) * rate / 1000000)
if tokens < 1 then
  return 0
end
redis.call('HSET', KEYS[1], 'tokens', tokens - 1, 'at_us', now_us)
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
return 1
