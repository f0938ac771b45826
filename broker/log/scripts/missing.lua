-- Returns why an entry or its payload is missing.
-- ARGV: epoch, number. Reply: {'TRIMMED' | 'LOST'} or {'FENCED' | 'CLOSED'}.
-- uses: run
local refused = fence(ARGV[1])
if refused then return {refused} end
return {tonumber(ARGV[2]) <= (numbers(STATE, 'trim_floor')) and 'TRIMMED' or 'LOST'}
