-- Makes room for the bytes of a kept version that are not here: `store_chunk` takes them from now on.
-- ARGV: epoch, version, chunks. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
if redis.call('SISMEMBER', KEPT, ARGV[2]) == 1 and redis.call('HEXISTS', PUBLICATIONS, ARGV[2]) == 0 then
  redis.call('HSET', STAGED_WEIGHTS, ARGV[2], ARGV[3])
end
return {'OK'}
