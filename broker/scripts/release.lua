-- Lets the next learner in at once.
-- ARGV: epoch. Reply: {'OK'} also when the lease was lost already.
-- uses: run
redis.call('DEL', ABSENT)
if (numbers(STATE, 'epoch')) == tonumber(ARGV[1]) then
  redis.call('HDEL', STATE, 'holder', 'lease_expires_ms')
end
return {'OK'}
