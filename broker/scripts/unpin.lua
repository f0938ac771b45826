-- Lets the bytes of a pinned version go with the others.
-- ARGV: epoch, version. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, weights
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
redis.call('SREM', PINS, ARGV[2])
drop_weights()
return {'OK'}
