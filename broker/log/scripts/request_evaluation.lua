-- Asks evaluation sessions to play a version, instead of the one before.
-- ARGV: epoch, version. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
redis.call('HSET', STATE, 'evaluate_version', ARGV[2])
changed()
return {'OK'}
