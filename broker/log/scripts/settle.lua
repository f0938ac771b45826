-- Gives budget back up to a position; never goes back. Wakes the sessions that it gives credit to, and no other.
-- ARGV: epoch, position. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, credit, turns, settled
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local position = tonumber(ARGV[2])
if position > (numbers(STATE, 'settled')) then
  set_settled(position)
  share_out(false)
end
return {'OK'}
