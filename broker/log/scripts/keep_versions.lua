-- Sets which versions the registry keeps: their bytes stay, those of other versions are removed. A number
-- that is registered is never drawn again, and sessions that watch learn the revision of the traffic.
-- ARGV: epoch, traffic revision, highest number registered, versions that are kept ...
-- Reply: {'OK', kept versions whose bytes are not here ...} or {'FENCED' | 'CLOSED'}.
-- uses: run, weights
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local drawn, traffic = numbers(STATE, 'version_counter', 'traffic_revision')
if tonumber(ARGV[3]) > drawn then redis.call('HSET', STATE, 'version_counter', ARGV[3]) end
if tonumber(ARGV[2]) ~= traffic then
  redis.call('HSET', STATE, 'traffic_revision', ARGV[2])
  changed()
end
local reply = {'OK'}
redis.call('DEL', KEPT)
for i = 4, #ARGV do
  redis.call('SADD', KEPT, ARGV[i])
  if redis.call('HEXISTS', PUBLICATIONS, ARGV[i]) == 0 then reply[#reply + 1] = ARGV[i] end
end
drop_weights()
return reply
