-- A version need not be played any longer: its bytes go with the others, and evaluation sessions are
-- asked for it no more. A newer version that they are asked for stays asked for.
-- ARGV: epoch, version. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, weights
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
redis.call('SREM', PINS, ARGV[2])
if (numbers(STATE, 'evaluate_version')) == tonumber(ARGV[2]) then
  redis.call('HSET', STATE, 'evaluate_version', 0)
  changed()
end
drop_weights()
return {'OK'}
