-- Tells whether every session on a round's roster has appended or is closed.
-- ARGV: epoch, round. Reply: {'OK', 0 or 1} or {'FENCED' | 'CLOSED'}.
-- uses: run
local refused = fence(ARGV[1])
if refused then return {refused} end
local wanted, round, is_open = tonumber(ARGV[2]), numbers(STATE, 'round', 'round_open')
local is_done = wanted < round or (wanted == round and is_open == 1 and redis.call('SCARD', ROSTER) == 0)
return {'OK', is_done and 1 or 0}
