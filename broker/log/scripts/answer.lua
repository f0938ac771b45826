-- Notes that a command was not done, and why; what was done is noted with its commit.
-- ARGV: epoch, number, answer (JSON). Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, commands
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
answer(ARGV[2], ARGV[3])
return {'OK'}
