-- Stores one chunk of weight bytes of a version that is not published yet. The one place where bulk
-- passes through Lua: only a script can write at `maxmemory`.
-- ARGV: epoch, version, index, bytes. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
if redis.call('HEXISTS', STAGED_WEIGHTS, ARGV[2]) == 1 then
  redis.call('SET', WEIGHTS .. ARGV[2] .. ':' .. ARGV[3], ARGV[4])
end
return {'OK'}
