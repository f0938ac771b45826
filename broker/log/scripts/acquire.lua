-- Takes the lease: when it is free, expired by Redis time, or held by the same holder. The epoch rises;
-- on a Redis that went back in time it leaps, for it may be older than the true one.
-- ARGV: run, holder, time to live in ms.
-- Reply: {'OK', epoch, fresh, closed, trim floor, version, head, commits} or {'HELD', holder, ms left}
--        or {'OTHER_RUN', run}.
-- uses: run
redis.call('DEL', ABSENT)
local run = redis.call('HGET', STATE, 'run')
if run and run ~= ARGV[1] then return {'OTHER_RUN', run} end
local now = now_ms()
local holder = redis.call('HGET', STATE, 'holder')
local expires, epoch, floor, version, number =
  numbers(STATE, 'lease_expires_ms', 'epoch', 'trim_floor', 'version', 'number')
if holder and holder ~= ARGV[2] and expires > now then return {'HELD', holder, expires - now} end
local closed = is_closed()
epoch = epoch + 1
if run and closed then epoch = epoch + leap() end
redis.call('DEL', DAMAGED)
redis.call('HSET', STATE, 'run', run or ARGV[1], 'holder', ARGV[2], 'epoch', epoch,
  'lease_expires_ms', now + ARGV[3])
if not run then redis.call('HSET', STATE, 'layout', LAYOUT) end
return {'OK', epoch, run and 0 or 1, closed and 1 or 0, floor, version, number,
  redis.call('LRANGE', COMMITS, 0, -1)}
