-- The commands that are kept, oldest first; writes nothing.
-- Reply: a list of commands as in _commands.lua.
-- uses: run, commands
local found, newest = {}, (numbers(STATE, 'command'))
for number = math.max(1, newest - KEPT_COMMANDS + 1), newest do
  found[#found + 1] = command_of(number)
end
return found
