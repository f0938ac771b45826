-- Stores the learner's report of itself.
-- ARGV: epoch, JSON. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
redis.call('SET', LEARNER, ARGV[2])
return {'OK'}
