-- Which weight bytes stay: the newest two publications, what is pinned and what is being fetched.
-- Needs: run.

local function drop_chunks(version, chunks)
  for index = 0, chunks - 1 do
    redis.call('UNLINK', WEIGHTS .. version .. ':' .. int(index))
  end
end

-- Unlinks every publication but the newest two, the pinned, those that are being fetched and those that the
-- registry keeps, and what was staged for a version that is past.
local function drop_weights()
  local newest, before = numbers(STATE, 'version', 'previous_version')
  local kept = redis.call('HGETALL', PUBLICATIONS)
  for i = 1, #kept, 2 do
    local version = tonumber(kept[i])
    local pinned = redis.call('SISMEMBER', PINS, kept[i]) + redis.call('SISMEMBER', KEPT, kept[i])
      + redis.call('HEXISTS', FETCHES, kept[i]) > 0
    if version ~= newest and version ~= before and not pinned then
      drop_chunks(kept[i], tonumber(string.match(kept[i + 1], '(%d+)$')))
      redis.call('HDEL', PUBLICATIONS, kept[i])
    end
  end
  local staged = redis.call('HGETALL', STAGED_WEIGHTS)
  for i = 1, #staged, 2 do
    if tonumber(staged[i]) < newest and redis.call('SISMEMBER', KEPT, staged[i]) == 0 then
      drop_chunks(staged[i], tonumber(staged[i + 1]))
      redis.call('HDEL', STAGED_WEIGHTS, staged[i])
    end
  end
end
