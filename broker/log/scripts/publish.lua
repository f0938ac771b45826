-- Stores the last chunk of a version, moves the pointer of the weights forward, settles, and in lock-step
-- opens the next round. Repeating it changes nothing. Who waits for credit and gets none is not woken: it
-- could not act with the weights.
-- ARGV: epoch, version, update, sha256, size, chunks, settled, scalars (JSON), round ('' for none),
--       pin (0 or 1), bytes of the last chunk (small weights have no other: a call less for each).
-- Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, credit, turns, settled, rounds, weights
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local version, current, settled = tonumber(ARGV[2]), numbers(STATE, 'version', 'settled')
if version <= current then return {'OK'} end
redis.call('SET', WEIGHTS .. ARGV[2] .. ':' .. int(ARGV[6] - 1), ARGV[11])
redis.call('HSET', PUBLICATIONS, ARGV[2], table.concat({ARGV[3], ARGV[4], ARGV[5], ARGV[6]}, ' '))
redis.call('HDEL', STAGED_WEIGHTS, ARGV[2])
if ARGV[10] == '1' then redis.call('SADD', PINS, ARGV[2]) end
redis.call('HSET', STATE, 'version', version, 'previous_version', current, 'update', ARGV[3],
  'sha256', ARGV[4], 'size', ARGV[5], 'scalars', ARGV[8])
drop_weights()
if tonumber(ARGV[7]) > settled then set_settled(tonumber(ARGV[7])) end
local opened
if ARGV[9] ~= '' then opened = next_round(tonumber(ARGV[9])) else opened = open_round() end
if opened then changed() else share_out(true) end
return {'OK'}
