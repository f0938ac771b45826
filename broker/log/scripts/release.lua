-- Lets the next learner in at once. A stop that was asked for is done: a learner that begins now goes on.
-- ARGV: epoch. Reply: {'OK'} also when the lease was lost already.
-- uses: run
redis.call('DEL', ABSENT)
if (numbers(STATE, 'epoch')) == tonumber(ARGV[1]) then
  redis.call('HDEL', STATE, 'holder', 'lease_expires_ms')
  if (numbers(STATE, 'desired')) == 3 then redis.call('HSET', STATE, 'stop_done', 1) end
end
return {'OK'}
