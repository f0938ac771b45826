-- The settled position, which frees its part of the budget.
-- Needs: run.

-- Running total of steps at a position: that of the newest entry at or before it.
local function steps_at(position)
  local number, total, trimmed = numbers(STATE, 'number', 'steps_total', 'trim_steps')
  if position >= number then return total end
  local entry = redis.call('XREVRANGE', LOG, int(position) .. '-0', '-', 'COUNT', 1)[1]
  if not entry then return trimmed end
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 't' then return tonumber(entry[2][i + 1]) end
  end
end

-- Sets the settled position; never beyond the newest entry.
local function set_settled(position)
  local settled = math.min(position, (numbers(STATE, 'number')))
  redis.call('HSET', STATE, 'settled', settled, 'settled_steps', steps_at(settled))
end
