-- The permits of one key of a concurrency limit: one node says what it has in use and what it wants, and is told what it
-- holds. What is said is state and no increment, so that a message may come twice, late or never.
--
-- KEYS[1]    the key's record
-- KEYS[2]    timed permits, a sorted set as lua/timed-permits.lua has it: no node renews them, and each counts until it is released
--            or its time ends. Nodes have what they leave of the limit
-- ARGV[1]    12 numbers; 16 bytes: the node's instance; and for each lot of permits that are to be timed permits from now on 16
--            bytes, its id, and 2 numbers. Numbers are whole, and are written as little-endian doubles from 0 to 2^53:
--         sequence              a message whose number is not above that of the node's last one changes nothing
--         in_use, want          permits that callers of the node hold, and those that it wants in all
--         least                 fewer than this in addition are of no use
--         waits                 1 if callers wait for their turn, so that the node has a place in the line of nodes
--         most                  the limit
--         lease_us              permits of a node that is silent for this time are free
--         place_us              a node that does not ask for this time loses its place in the line
--         slice_us              how long a node may keep a permit beyond its even part while another node waits
--         poll_min_us, poll_max_us   bounds of the time after which a node that waits asks again
--         keep_us               added to the time after which the record is forgotten
--         permits, time_us      permits that the node hands over, and their time to live. They are not in `in_use` any more.
--                               All lots are taken over, or none: if the node does not hold them all by its record, or more
--                               than the limit is held
--
-- Reply      a bulk string of 6 numbers: what this node holds now; what all hold; how many permits this node is to give
--            back, as they come free, though callers wait there, and in how many microseconds that begins; when to ask again;
--            how many permits were taken over
-- Record     'P1', and for each node its instance and 9 numbers: sequence, held, want; until_us: when they are free; since_us:
--            when it began to wait, or got a permit last; asked_us: its last message; above_us: since when it has more than its
--            even part, or 0; give, give_us: permits that it was told to give back, and from when on
-- Errors     TIDEGATE FOREIGN (key) <type>  the key holds another program's value of this type; WRONGTYPE: of another
-- Expiry     the record when the last node's permits are free, the set when the last of its permits ends
-- Cost       O(m log m) for m nodes that have the key, and O(log n) for each permit that is taken over or has ended, of n timed
--            ones. Calls: GET, TIME, ZCARD, SET; where there are timed permits ZREMRANGEBYSCORE and ZCARD, and where some are
--            taken over ZADD for each, PTTL and PEXPIRE.

local MAGIC, NODE, NODE_BYTES = 'P1', '<c16ddddddddd', 16 + 9 * 8
local TIMED, TIMED_AT, TIMED_BYTES = '<c16dd', 113, 16 + 2 * 8
local call, ceil, floor, min, max = redis.call, math.ceil, math.floor, math.min, math.max

local sequence, in_use, want, least, waits, most, lease_us, place_us, slice_us, poll_min_us, poll_max_us, keep_us =
  struct.unpack('<dddddddddddd', ARGV[1])
local instance = ARGV[1]:sub(97, 112)
local record = call('GET', KEYS[1]) or MAGIC
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
if record:sub(1, 2) ~= MAGIC or (#record - 2) % NODE_BYTES ~= 0 then
  return redis.error_reply('TIDEGATE FOREIGN (key) string')
end

-- Nodes whose lease has not ended. A clock that went back makes no lease longer.
local nodes, me = {}, nil
for at = 3, #record, NODE_BYTES do
  local node = {}
  node.instance, node.sequence, node.held, node.want, node.until_us, node.since_us, node.asked_us, node.above_us,
    node.give, node.give_us = struct.unpack(NODE, record, at)
  node.until_us = min(node.until_us, now + lease_us)
  node.since_us, node.asked_us = min(node.since_us, now), min(node.asked_us, now)
  node.above_us, node.give_us = min(node.above_us, now), min(node.give_us, now + slice_us)
  if node.until_us > now then
    nodes[#nodes + 1] = node
    if node.instance == instance then me = node end
  end
end
if not me then
  me = { instance = instance, sequence = 0, held = 0, want = 0, until_us = 0, since_us = now, asked_us = 0, above_us = 0,
    give = 0, give_us = 0 }
  nodes[#nodes + 1] = me
end
local is_new = sequence > me.sequence

local function text(number)
  return ('%.0f'):format(number)
end

local timed, taken_over = call('ZCARD', KEYS[2]), 0
if timed > 0 then
  call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now))
  timed = call('ZCARD', KEYS[2])
end
if is_new then
  local lots, longest_us = {}, 0
  for at = TIMED_AT, #ARGV[1], TIMED_BYTES do
    local id, permits, time_us = struct.unpack(TIMED, ARGV[1], at)
    lots[#lots + 1] = { id = id, permits = permits, time_us = time_us }
    taken_over, longest_us = taken_over + permits, max(longest_us, time_us)
  end
  local held = 0
  for _, node in ipairs(nodes) do held = held + node.held end
  -- What the record does not have down for the node, others may hold; and beyond the limit an outage policy gave some.
  if in_use + taken_over > me.held or held + timed > most then lots, taken_over = {}, 0 end
  if taken_over > 0 then
    local left_ms, ends_ms = call('PTTL', KEYS[2]), ceil((longest_us + keep_us) / 1000)
    for _, lot in ipairs(lots) do
      for place = 0, lot.permits - 1 do call('ZADD', KEYS[2], text(now + lot.time_us), lot.id .. place) end
    end
    if left_ms < ends_ms then call('PEXPIRE', KEYS[2], text(ends_ms)) end
  end
  timed = timed + taken_over
end
local for_nodes = max(most - timed, 0)

local function is_waiting(node)
  return node.want > node.held and now - node.asked_us <= place_us
end

if is_new then
  if not is_waiting(me) or in_use < me.held then me.since_us = now end
  me.sequence, me.held, me.want = sequence, in_use, max(want, in_use)
  me.until_us, me.asked_us, me.give = now + lease_us, now, 0
end

-- The even part: the most that each node can have if all have what they want up to there.
local wants, free, held_by_all = {}, for_nodes, 0
for index, node in ipairs(nodes) do
  wants[index] = is_waiting(node) and node.want or node.held
  free, held_by_all = free - node.held, held_by_all + node.held
end
free = max(free, 0)
table.sort(wants)
local level, rest = for_nodes, for_nodes
for index, wanted in ipairs(wants) do
  local part = max(floor(rest / (#wants - index + 1)), 0)
  if wanted > part then
    level = part
    break
  end
  rest = rest - wanted
end

-- What others who wait lack up to their part, before this node's turn and after it, and what is on its way to them. The one
-- who has least is first, and of these the one who has waited for longest.
local before, after, lack, lack_more, due_us = 0, 0, 0, 0, nil
local is_before = true
for _, node in ipairs(nodes) do
  if node == me then
    is_before = false
  else
    if is_waiting(node) then
      local missing = max(min(node.want, level + 1) - node.held, 0)
      lack, lack_more = lack + max(min(node.want, level) - node.held, 0), lack_more + missing
      local is_tie = node.held == me.held and node.since_us == me.since_us
      if node.held < me.held or node.held == me.held and node.since_us < me.since_us or is_tie and is_before then
        before = before + missing
      else
        after = after + missing
      end
    end
    if node.give > 0 and node.give_us + slice_us > now then
      lack, lack_more = lack - node.give, lack_more - node.give
    end
    if node.above_us > 0 then due_us = min(due_us or now + slice_us, node.above_us + slice_us) end
  end
end

if is_new then
  local granted = max(min(min(me.want, level + 1) - in_use, free - before), 0)
  granted = granted + max(min(me.want - in_use - granted, free - granted - before - after), 0)
  if granted < least then granted = 0 end
  me.held, free, held_by_all = in_use + granted, free - granted, held_by_all + granted
  if granted > 0 then me.since_us = now end
  if waits == 0 then me.want = me.held end
  if me.held <= level then
    me.above_us = 0
  elseif me.above_us == 0 then
    me.above_us = now
  end
  me.give = max(min(me.held - level, lack - free), min(me.held - level - 1, lack_more - free), 0)
  me.give_us = now
  if me.give == 0 and me.held > level and lack_more > free then
    me.give, me.give_us = 1, max(me.above_us + slice_us, now)
  end

  local parts = { MAGIC }
  for _, node in ipairs(nodes) do
    parts[#parts + 1] = struct.pack(NODE, node.instance, node.sequence, node.held, node.want, node.until_us, node.since_us,
      node.asked_us, node.above_us, node.give, node.give_us)
  end
  call('SET', KEYS[1], table.concat(parts), 'PX', ceil((lease_us + keep_us) / 1000))
end

-- The first in the line asks often, at first and again when another node's time is over.
local poll_us = poll_max_us
if before == 0 then
  local waited_us = now - me.since_us
  if due_us and due_us <= now then waited_us = min(waited_us, now - due_us) end
  poll_us = max(min(floor(waited_us / 8), poll_max_us), poll_min_us)
  if due_us and due_us > now then poll_us = max(min(poll_us, due_us - now), poll_min_us) end
end
return struct.pack('<dddddd', me.held, held_by_all + timed, me.give, max(me.give_us - now, 0), poll_us, taken_over)
