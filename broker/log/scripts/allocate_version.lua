-- Draws a version that was never drawn before, for bytes in so many chunks.
-- ARGV: epoch, chunks. Reply: {'OK', version} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local version = redis.call('HINCRBY', STATE, 'version_counter', 1)
redis.call('HSET', STAGED_WEIGHTS, int(version), ARGV[2])
return {'OK', version}
