-- Answers for a kept version again, once its bytes are stored. The pointer of the weights stays where it is.
-- ARGV: epoch, version, update, sha256, size, chunks. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
if redis.call('HDEL', STAGED_WEIGHTS, ARGV[2]) == 1 then
  redis.call('HSET', PUBLICATIONS, ARGV[2], table.concat({ARGV[3], ARGV[4], ARGV[5], ARGV[6]}, ' '))
end
return {'OK'}
