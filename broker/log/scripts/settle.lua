-- Gives budget back up to a position; never goes back.
-- ARGV: epoch, position. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, credit
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local position = tonumber(ARGV[2])
if position > (numbers(STATE, 'settled')) then
  set_settled(position)
  changed()
end
return {'OK'}
