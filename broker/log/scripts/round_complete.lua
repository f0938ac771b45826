-- Tells whether every session on a round's roster has appended, is closed, or is silent for too long.
-- ARGV: epoch, round. Reply: {'OK', 0 or 1} or {'FENCED' | 'CLOSED'}.
-- uses: run, credit, turns, rounds
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local wanted, round, is_open = tonumber(ARGV[2]), numbers(STATE, 'round', 'round_open')
if wanted < round then return {'OK', 1} end
if wanted > round or is_open == 0 then return {'OK', 0} end
drop_silent()
return {'OK', redis.call('SCARD', ROSTER) == 0 and 1 or 0}
