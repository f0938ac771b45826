-- Gives the lease back, so that the next learner need not wait. A stop that was asked for is completed: a
-- learner that begins now continues the run.
-- ARGV: epoch. Reply: {'OK'} also when the lease was lost already.
-- uses: run
redis.call('DEL', ABSENT)
if (numbers(STATE, 'epoch')) == tonumber(ARGV[1]) then
  redis.call('HDEL', STATE, 'holder', 'lease_expires_ms')
  if (numbers(STATE, 'desired')) == 3 then redis.call('HSET', STATE, 'stop_done', 1) end
end
return {'OK'}
